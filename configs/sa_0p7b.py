"""The paper's 0.7B pair, SA side: what does plain self attention reach under the recipe that XSA is held against?

Command: python train.py --config configs/sa_0p7b.py --workdir runs/sa_0p7b
Result: not yet measured.

Known from the paper (arXiv 2603.09078): 24 layers, context 2048, about 0.5M tokens a step, 200K steps, AdamW with cosine
decay, a norm after the embedding. Not known, so our stand-in: width, heads and feed-forward (the GPT-3 shape 24 x 1536),
the GPT-2 vocabulary padded to 50304, learning rate 2.5e-4, warm-up, betas, weight decay, clip, tied embeddings.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config() -> ConfigDict:
    config = paper.get_config("0p7b")
    config.attention.kind = "sa"
    return config
