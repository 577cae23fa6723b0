"""Exclusive Self Attention (XSA) in JAX: training, evaluation, and comparison with plain self attention.

Array names end in one letter per dimension, the same letters everywhere:

    B batch            T query position    S key position     D model width
    H query heads      K key-value heads   G = H / K          E head width
    F mlp width        V vocabulary        L layers
    C positions in one chunk of the loss

For example, `q_BTHE` holds queries, and `v_BSKE` holds the values that attention averages.
"""

__version__ = "0.2.0"
