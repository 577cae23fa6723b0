"""The paper's 2.7B pair, XSA side: how much lower is the loss when attention leaves out the own value?

Command: python train.py --config configs/xsa_2p7b.py --workdir runs/xsa_2p7b
Result: not yet measured.

Known from the paper (arXiv 2603.09078): 32 layers, context 2048, about 0.5M tokens a step, 200K steps, AdamW with cosine
decay, a norm after the embedding. Not known, so our stand-in: width, heads and feed-forward (the GPT-3 shape 32 x 2560),
the GPT-2 vocabulary padded to 50304, learning rate 1.6e-4, warm-up, betas, weight decay, clip, tied embeddings.
"""

from ml_collections import ConfigDict

from configs import paper


def get_config() -> ConfigDict:
    config = paper.get_config("2p7b")
    config.attention.kind = "xsa"
    return config
