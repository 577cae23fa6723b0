"""Exclusive Self Attention (XSA) in JAX: train it, measure it, understand it.

Array names end in one letter per dimension, the same letters everywhere:

    B batch            T query position    S key position     D model width
    H query heads      K key-value heads   G = H / K          E head width
    F mlp width        V vocabulary        L layers

so `q_BTHE` is a query tensor and `v_BSKE` the values that it averages.
"""
