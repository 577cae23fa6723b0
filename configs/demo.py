"""What does XSA change? A pair small enough for two CPU cores and a few minutes; `make demo` trains and compares it.

Command: make demo, which runs train.py with this file twice, with --config.attention.kind=sa and xsa
Result: validation loss SA 1.8240, XSA 1.7996 nats per token, which is a byte here (2 cores of an AMD EPYC, jax 0.10.2; one pair,
which proves nothing).
"""

from ml_collections import ConfigDict

from xsa_jax.config import config_dict


def get_config() -> ConfigDict:
    config = config_dict()
    config.model.update(vocab_size=260, num_layers=4, d_model=128, d_ff=512, dtype="float32")
    config.attention.update(num_heads=4, num_kv_heads=4, head_dim=32)
    config.data.update(path="runs/demo/tokens", seq_len=256, batch_size=4)
    config.optim.update(peak_lr=4e-3, warmup_steps=40)
    config.train.update(num_steps=400, log_every=5, loss_chunk=256)
    config.eval.update(every=80, tokens=32_768)
    config.checkpoint.update(every=200, keep_last=1)
    return config
