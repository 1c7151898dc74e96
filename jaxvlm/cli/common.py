"""Flags of the commands that read a trained model."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

VECTORS = ("embed", "eval", "mine")
"""Commands that take encoders too."""


def define_model(values: flags.FlagValues, adapters: bool = True) -> None:
    """Declare which model, and on which mesh; ``adapters``: the command's models take some."""
    flags.DEFINE_string(
        "checkpoint",
        "",
        "A workdir of `jaxvlm train` (its best checkpoint is used), or a Hugging Face folder.",
        flag_values=values,
    )
    if adapters:
        flags.DEFINE_string(
            "adapter",
            "",
            "A PEFT adapter folder (LoRA, DoRA) for the Hugging Face folder.",
            flag_values=values,
        )
    flags.DEFINE_string(
        "mesh",
        "",
        "Devices along mesh axes, e.g. fsdp=4,tensor=2; all on data if not given.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "dtype",
        "",
        ["", "float32", "bfloat16"],
        "Of the computation; if not given, the run's, and float32 for a Hugging Face folder.",
        flag_values=values,
    )


def define_instructions(values: flags.FlagValues, note: str = "") -> None:
    """Declare what vectors are for, a flag a side; ``note`` stands before their help."""
    for side in ("query", "document"):
        flags.DEFINE_string(
            f"{side}_instruction",
            "",
            f"{note}What vectors of a {side} are for, where an item does not say it: the system's "
            "turn of a decoder; before an encoder's text as it stands, so end it with a space.",
            flag_values=values,
        )


def load_model(command: str, values: flags.FlagValues) -> Any:
    """The model that the flags of :func:`define_model` name.

    Raises:
        ConfigError: no checkpoint is named, or the mesh is none.
    """
    from jaxvlm.build.encoder import Encoder
    from jaxvlm.build.loaded import load
    from jaxvlm.config import ConfigError
    from jaxvlm.parallel import distributed

    if not values.checkpoint:
        raise ConfigError(f"{command} needs --checkpoint=WORKDIR or a Hugging Face folder")
    mesh = _mesh(values.mesh)
    distributed.initialize()
    adapter = values.adapter if "adapter" in values else ""
    model = load(values.checkpoint, mesh=mesh, adapter=adapter, dtype=values.dtype)
    if command not in VECTORS and isinstance(model, Encoder):
        raise ConfigError(
            f"--checkpoint={values.checkpoint} is an encoder: it makes vectors, and "
            "`jaxvlm embed` writes them"
        )
    return model


def say(text: str, end: str = "\n") -> None:
    """Print from process 0."""
    from jaxvlm.parallel.distributed import is_silent

    if not is_silent():
        print(text, end=end, flush=True)


def _mesh(text: str) -> Any:
    """``fsdp=4,tensor=2`` as a MeshConfig; axes that are not named have one device."""
    from jaxvlm.config import ConfigError, MeshConfig

    if not text:
        return MeshConfig()
    axes = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes = dict.fromkeys(axes, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in axes or not size.removeprefix("-").isdecimal():
            raise ConfigError(f"--mesh={text}: give AXIS=N,AXIS=N with the axes {', '.join(axes)}")
        sizes[axis] = int(size)
    return MeshConfig(**sizes)
