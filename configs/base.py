"""Every default, in one place. Another config file starts from `get_config()` and changes a few lines.

The question it asks: none; it is the ground that the others stand on (a 124M-parameter GPT-2 shape).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # initial weights and dropout; the data order has its own seed

    config.model = ConfigDict()
    config.model.vocab_size = 50304  # GPT-2's 50257, padded to a multiple of 128
    config.model.num_layers = 12
    config.model.d_model = 768
    config.model.d_ff = 3072
    config.model.mlp = "gelu"  # gelu | swiglu
    config.model.norm = "layernorm"  # layernorm | rmsnorm
    config.model.embed_norm = True  # the paper's extra norm after the embedding
    config.model.tie_embeddings = True
    config.model.logit_softcap = 0.0  # 0 = off
    config.model.dropout = 0.0
    config.model.dtype = "bfloat16"  # compute; parameters and the XSA projection stay float32
    config.model.remat = "none"  # none | full | dots | attention

    config.attention = ConfigDict()
    config.attention.kind = "sa"  # sa | xsa
    config.attention.impl = "auto"  # auto or a name in kernels/README.md: reference, xla, cudnn, splash, tokamax, tpu, ...
    config.attention.num_heads = 12
    config.attention.num_kv_heads = 12  # fewer than num_heads: grouped queries; 1: multi-query
    config.attention.head_dim = 64
    config.attention.rope_theta = 10_000.0
    config.attention.qk_norm = False
    config.attention.window = 0  # keys a token sees, itself included; 0 = all before it
    config.attention.logit_softcap = 0.0  # 0 = off
    config.attention.sinks = False  # one learned sink logit per head
    config.attention.value_residual = False  # mix the first layer's values into every layer's
    config.attention.xsa = ConfigDict()
    config.attention.xsa.layers = "all"  # all | first:n | last:n | every:k | 0,3,5
    config.attention.xsa.strength = "full"  # full | fixed (alpha) | learned (per head, tanh, starts at 0)
    config.attention.xsa.alpha = 1.0
    config.attention.xsa.zero_rule = "clamp"  # |v|^2 becomes: clamp max(|v|^2, eps) | add |v|^2 + eps | exact
    config.attention.xsa.eps = 1e-12

    config.data = ConfigDict()
    config.data.path = "tokens"  # a folder that `python -m xsa_jax.data.prepare` wrote
    config.data.seq_len = 2048
    config.data.batch_size = 256  # rows per step, over all hosts
    config.data.documents = "ignore"  # ignore: as one stream | isolate: attention stays inside a document
    config.data.seed = 0
    config.data.workers = 0  # processes that read ahead; 0 = threads of this one

    config.optim = ConfigDict()
    config.optim.name = "adamw"
    config.optim.peak_lr = 6e-4
    config.optim.schedule = "cosine"  # cosine | constant, both after a linear warm-up
    config.optim.warmup_steps = 2000
    config.optim.final_lr_ratio = 0.1
    config.optim.beta1 = 0.9
    config.optim.beta2 = 0.95
    config.optim.eps = 1e-8
    config.optim.weight_decay = 0.1  # on matrices, never on biases, norms, gates and sinks
    config.optim.clip_norm = 1.0  # 0 = off

    config.train = ConfigDict()
    config.train.num_steps = 200_000
    config.train.z_loss = 0.0
    config.train.loss_chunk = 128  # positions of each row whose logits exist at once
    config.train.log_every = 10

    config.eval = ConfigDict()
    config.eval.every = 1000  # 0 = only after the last step
    config.eval.tokens = 1_048_576  # validation tokens per evaluation

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1000
    config.checkpoint.keep_last = 2
    config.checkpoint.keep_every = 0  # also keep every multiple of this for good; 0 = none

    config.mesh = ConfigDict()
    config.mesh.data = -1  # -1 = all devices that are left
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    return config
