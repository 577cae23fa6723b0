"""Does the whole path from config to checkpoint work here? This is the smallest run of it, which the tests use.

Command: python train.py --config configs/smoke.py --workdir runs/smoke --config.data.path=<a store of the byte tokenizer>
Result: none is measured; the run ends in seconds.
"""

from ml_collections import ConfigDict

from xsa_jax.config import config_dict


def get_config() -> ConfigDict:
    """The config of the smoke test."""
    config = config_dict()
    config.model.update(vocab_size=260, num_layers=2, d_model=32, d_ff=64, dtype="float32")
    config.attention.update(num_heads=4, num_kv_heads=2, head_dim=8)
    config.data.update(seq_len=32, batch_size=8)
    config.optim.update(warmup_steps=2, peak_lr=3e-3)
    config.train.update(num_steps=20, log_every=2, loss_chunk_tokens=128)
    config.eval.update(every=10, tokens=2048)
    config.checkpoint.update(every=5)
    return config
