"""Text files -> tokens -> token store -> batches. Nothing in this package imports jax.

`text` reads documents, `tokenizer` turns them into ids, `prepare` writes them as a token store, `store` reads its `shard`s back
at random, `loader` serves shuffled batches, `spawn` keeps jax out of worker processes, `python_text` builds a demo corpus.
"""
