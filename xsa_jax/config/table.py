"""The text of docs/config.md, and a printout of one run's config.

python -m xsa_jax.config.table > docs/config.md
"""

from xsa_jax.config.fields import fields
from xsa_jax.config.load import flatten, to_dict
from xsa_jax.config.schema import Config

_HEAD = """\
# Every config field

`--config.<field>=<value>` sets a field. `python train.py --config ... --print_config` prints a config and trains nothing.
"May change" marks the fields that a run may change when it is continued. "May differ" marks the fields in which runs that are
compared may differ.
`make docs` writes this file from the declarations in [xsa_jax/config/schema.py](../xsa_jax/config/schema.py).
"""


def markdown(schema: type[Config] = Config) -> str:
    """The text of docs/config.md."""
    lines = ["| field | default | meaning | may change | may differ |", "|---|---|---|---|---|"]
    for name, field in fields(schema).items():
        about = field.about
        marks = ["yes" if mark else "" for mark in (about.may_change, about.may_differ)]
        lines.append(f"| `{name}` | `{field.default}` | {about.doc} | {' | '.join(marks)} |")
    return _HEAD + "\n" + "\n".join(lines) + "\n"


def text(config: Config) -> str:
    """A config as one line `name=value` per field. A value that differs from the default is followed by the default."""
    lines = []
    for name, value in flatten(to_dict(config)):
        default = fields(type(config))[name].default
        lines.append(f"{name}={value}" + (f"  # default: {default}" if value != default else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
