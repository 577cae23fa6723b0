"""Selection of the layers that apply XSA, by `attention.xsa.layers`."""

from xsa_jax.config.schema import AttentionConfig
from xsa_jax.errors import ConfigError


def projecting_layers(attention: AttentionConfig, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer applies XSA; False for all layers of plain self attention.

    Raises:
      ConfigError: `attention.xsa.layers` is invalid, see `select`.
    """
    chosen = select(attention.xsa.layers, num_layers)
    return chosen if attention.kind == "xsa" else (False,) * num_layers


def select(spec: str, num_layers: int) -> tuple[bool, ...]:
    """Whether `spec` selects each layer.

    Args:
      spec: "all", "first:n", "last:n", "every:k" (layers k-1, 2k-1, ...), or a comma-separated list of indices.
      num_layers: number of layers of the model.

    Raises:
      ConfigError: `spec` has none of these forms, or names a layer that does not exist.
    """
    rule, _, argument = spec.partition(":")
    try:
        if spec == "all":
            chosen = set(range(num_layers))
        elif rule == "first":
            chosen = set(range(_positive(argument, num_layers)))
        elif rule == "last":
            chosen = set(range(num_layers - _positive(argument, num_layers), num_layers))
        elif rule == "every":
            step = _positive(argument, num_layers)
            chosen = set(range(step - 1, num_layers, step))
        else:
            chosen = {int(index) for index in spec.split(",")}
            if not chosen <= set(range(num_layers)):
                raise ValueError
    except ValueError:
        raise ConfigError(
            f"attention.xsa.layers={spec!r} with {num_layers} layers: expected 'all', 'first:n', 'last:n', 'every:k' "
            f"or a comma list of indices from 0 to {num_layers - 1}"
        ) from None
    return tuple(layer in chosen for layer in range(num_layers))


def _positive(text: str, most: int) -> int:
    value = int(text)
    if not 1 <= value <= most:
        raise ValueError
    return value
