"""What the six paper configs share: one recipe, three sizes. Not run by itself; each pair changes `attention.kind` and no more."""

from ml_collections import ConfigDict

from configs import base

# layers, width, heads, head width, peak learning rate: the shapes and rates of GPT-3 XL's neighbours (arXiv 2005.14165, table
# 2.1), our stand-in for what the XSA paper does not state.
_SIZES = {
    "0p7b": (24, 1536, 16, 96, 2.5e-4),
    "1p3b": (24, 2048, 16, 128, 2.0e-4),
    "2p7b": (32, 2560, 32, 80, 1.6e-4),
}


def get_config(size: str) -> ConfigDict:
    num_layers, d_model, num_heads, head_dim, peak_lr = _SIZES[size]
    config = base.get_config()
    config.model.update(num_layers=num_layers, d_model=d_model, d_ff=4 * d_model, remat="attention")
    config.attention.update(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    config.data.update(seq_len=2048, batch_size=256)  # 524,288 tokens a step
    config.optim.update(peak_lr=peak_lr, warmup_steps=2000)
    config.train.num_steps = 200_000
    return config
