"""Flags that commands share: those of the model that they load, and ``--config``, a recipe."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

EMBEDDINGS = ("embed", "eval", "mine")
"""Commands that also accept an encoder as the model."""
READING = ("data_format", "ignored_fields", "literal_markers")
"""Flags of how files of records are read."""


_MODEL = {
    "checkpoint": "The model to load: a workdir of `jaxvlm train` (its best checkpoint is used), "
    "also one in an object store (gs://BUCKET/FOLDER or s3://BUCKET/FOLDER), or a Hugging Face "
    "folder.",
    "adapter": "A PEFT adapter folder (LoRA or DoRA) to load with the Hugging Face folder of "
    "--checkpoint.",
    "family": "A model family of your own for the Hugging Face folder: MODULE, or FILE.py "
    "(docs/extend.md); by default the built-in one for the folder's model_type.",
    "mesh": "The number of devices on each mesh axis, such as fsdp=4,tensor=2; by default all "
    "devices are on the data axis.",
}
_KINDS: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    type(None): flags.DEFINE_float,
    list: flags.DEFINE_list,
    tuple: flags.DEFINE_multi_string,
}


def define_flags(values: flags.FlagValues, helps: Mapping[str, str], **defaults: Any) -> None:
    """Declare flags on ``values``.

    Args:
        values: the flags to add to.
        helps: flag -> its help text.
        **defaults: defaults of flags other than texts that default to "". Their type is the flag's:
            ``None`` is a number that need not be given, a list is given with commas, and a tuple
            by repeating the flag. Numbers are not negative, but for seeds and negative defaults.
    """
    for name, text in helps.items():
        default = defaults.get(name, "")
        define = _KINDS[type(default)]
        shown = list(default) if isinstance(default, tuple) else default
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        bound = {"lower_bound": 0} if is_number and default >= 0 and name != "seed" else {}
        define(name, shown, text, flag_values=values, **bound)


def define_model(values: flags.FlagValues) -> None:
    """Declare the flags that choose a model, its mesh and its dtype."""
    define_flags(values, _MODEL)
    flags.DEFINE_enum(
        "dtype",
        "",
        ["", "float32", "bfloat16"],
        "The dtype of the computation; by default that of the run, and float32 for a Hugging Face "
        "folder.",
        flag_values=values,
    )


_KV = {
    "kv": "Compress the KV cache of the prompt by this method (docs/kv_cache.md): none, vl_cache, "
    "snapkv, pyramid, window or random.",
    "kv_budget": "The share of a prompt's places that the layers keep on average, above 0 and at "
    "most 1; by default 0.1.",
    "kv_allocator": "Divide the budget among the layers by this: even, density or pyramid; by "
    "default the method's own.",
    "kv_recent": "The share of a layer's kept places that are the most recent ones, whatever their "
    "scores; by default 0.1 of vl_cache, 0 of others.",
    "kv_queries": "The number of a prompt's last tokens whose attention is observed; by default "
    "50.",
    "kv_threshold": "An attention weight counts as dense from this share of its row's largest on; "
    "by default 0.01.",
    "kv_clip": "Divide the budget by VL-Cache's own formula, whose sum is not the budget.",
}


def define_kv(values: flags.FlagValues) -> None:
    """Declare the flags that compress the KV cache."""
    numbers = {"kv_budget": 0.1, "kv_recent": 0.1, "kv_queries": 50, "kv_threshold": 0.01}
    define_flags(values, _KV, kv="none", kv_clip=False, **numbers)


CACHE = {
    "cache_memory_mb": "The maximum size of visual tokens in host memory, in MiB, so that an image "
    "that is read again is not re-encoded; 0 keeps none.",
    "cache_store": "A folder in which images' visual tokens are read and written, as a training "
    "run's config.cache.store (docs/cache.md).",
}


def define_cache(values: flags.FlagValues) -> None:
    """Declare the flags of the visual-token cache."""
    define_flags(values, CACHE, cache_memory_mb=0, cache_store="")


def use_cache(values: flags.FlagValues, model: Any) -> None:
    """Have a model read visual tokens from the cache that the flags choose, if any."""
    if values.cache_memory_mb or values.cache_store:
        model.use_cache(values.cache_memory_mb, values.cache_store)


def say_cached(model: Any) -> None:
    """Print how many images were read from the cache, and write its tokens to disk."""
    if getattr(model, "cache", None) is not None:
        say(model.cache.counts.text())
        model.cache.close()


def inference_figures(model: Any) -> dict[str, Any]:
    """What a compressed KV cache took and the visual-token cache read, for the JSON object."""
    memory, cache = getattr(model, "kv_memory", None), getattr(model, "cache", None)
    found = {f"kv_{name}_bytes": n for name, n in memory._asdict().items()} if memory else {}
    counts = {f"images_{name}": n for name, n in cache.counts._asdict().items()} if cache else {}
    return found | counts


def kv_settings(values: flags.FlagValues) -> dict[str, Any]:
    """The arguments of :func:`jaxvlm.inference.kv_policy.policy_of`, checked."""
    from jaxvlm.inference.kv_policy import policy_of

    given = [name for name in _KV if values[name].present or name == "kv"]
    settings: dict[str, Any] = {name: values[name].value for name in given}
    policy_of(**settings)  # before a model is loaded
    return settings


def define_instructions(values: flags.FlagValues, note: str = "The ") -> None:
    """Declare the instruction flags of queries and documents; their help starts with ``note``."""
    for side in ("query", "document"):
        text = (
            f"{note}instruction for each {side} that has none of its own: a decoder reads it "
            "as the system turn; an encoder reads it directly before the text, so end it with a "
            "space. By default that of the run, or of the sentence-transformers folder."
        )
        define_flags(values, {f"{side}_instruction": text})


def embed_settings(values: flags.FlagValues, model: Any, side: str, **settings: Any) -> Any:
    """Return the settings by which ``side`` is embedded: the model's own, and those of flags.

    Args:
        values: flags, with those of :func:`define_instructions`.
        model: the model that embeds.
        side: query | document.
        **settings: other fields of the result, an ``EmbedConfig``.
    """
    from jaxvlm.inference import input_types
    from jaxvlm.inference.items import EmbedConfig

    flag = values[f"{side}_instruction"]
    own = input_types.choose(model.input_types, side)
    chosen = input_types.choose(model.input_types, side, flag.value if flag.present else None)
    if own.instruction != chosen.instruction:
        say(f"--{flag.name}={flag.value!r} replaces the model's {own.instruction!r}")
    return EmbedConfig(**settings).of_type(chosen)


def define_reading(values: flags.FlagValues) -> None:
    """Declare the flags of how files of records are read."""
    texts = {
        "ignored_fields": "The names of fields of records to pass over, separated by commas; a "
        "record with any other field that is not read is refused. By default data.ignored_fields "
        "of the run.",
        "literal_markers": "The image markers of other formats, such as <image_1>, that are text, "
        "separated by commas; a text beside an image with any other but <image> is refused. By "
        "default data.literal_markers of the run.",
    }
    define_flags(values, texts, ignored_fields=[], literal_markers=[])
    flags.DEFINE_enum(
        "data_format",
        "run",
        ["run", "built_in"],
        "How files of records are read: as the run reads its own, which are its data.format, "
        "data.image_root, data.column_mapping and data.tsv_quoting; or by the defaults "
        "of these settings (built_in).",
        flag_values=values,
    )


def reading(values: flags.FlagValues) -> Any:
    """Return the data settings by which files of records are read: the run's, and those of flags.

    Raises:
        ConfigError: ``--checkpoint`` is missing, or its ``config.json`` is damaged.
    """
    from jaxvlm.config import DataConfig

    run = run_config(values)
    return flagged(values, run.data if run is not None else DataConfig())


def run_config(values: flags.FlagValues) -> Any:
    """Return the settings of the run in ``--checkpoint``; ``None`` for a Hugging Face folder.

    Raises:
        ConfigError: ``--checkpoint`` is missing, or its ``config.json`` is damaged.
    """
    from jaxvlm.checkpoint import run_changes, run_folder
    from jaxvlm.config import ConfigError
    from jaxvlm.hf import pretrained

    if not values.checkpoint:
        raise ConfigError("--checkpoint is missing: give a workdir or a Hugging Face folder")
    if pretrained.is_checkpoint(values.checkpoint):
        return None
    folder = run_folder.local_to_read(values.checkpoint, "--checkpoint")
    return run_changes.read_config_to_use(folder)


def compares_by_cosine(values: flags.FlagValues) -> bool:
    """Return whether embeddings of the model in ``--checkpoint`` are compared by cosine.

    A run says it, or a sentence-transformers folder; those of other folders are.

    Raises:
        ConfigError: the folder compares them neither by cosine nor by dot product.
    """
    from jaxvlm.hf import pretrained
    from jaxvlm.inference import embedding_evaluator, input_types

    run = run_config(values)
    if run is not None:
        return embedding_evaluator.compares_by_cosine(run)
    source = pretrained.find(values.checkpoint, choose=lambda config, where: None)
    assert source is not None
    settings = pretrained.sentence_settings(source)
    return input_types.similarity_of_folder(settings) == "cosine"


def flagged(values: flags.FlagValues, data: Any) -> Any:
    """Return data settings as the flags of :func:`define_reading` change them; says which."""
    default = type(data)()
    if values.data_format == "built_in":
        data = dataclasses.replace(
            data, format=default.format, image_root=default.image_root,
            column_mapping=default.column_mapping, tsv_quoting=default.tsv_quoting,
        )  # fmt: skip
    if data.image_root:
        say(
            f"image names in files are relative to the run's data.image_root={data.image_root!r}; "
            "with --data_format=built_in, to each file's own folder"
        )
    for name in ("ignored_fields", "literal_markers"):
        if not values[name].present:
            continue
        given, own = tuple(getattr(values, name)), getattr(data, name)
        if own not in ((), given):
            say(f"--{name}={','.join(given)} replaces the run's data.{name} {', '.join(own)}")
        data = dataclasses.replace(data, **{name: given})
    return data


def flags_only(command: str, args: list[str]) -> None:
    """Check that a command is given flags, and nothing else.

    Raises:
        ConfigError: it is given something else.
    """
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"{command} takes flags only, not {args[0]!r}")


def load_model(command: str, values: flags.FlagValues) -> Any:
    """Load the model that the flags of :func:`define_model` choose.

    Raises:
        ConfigError: ``--checkpoint`` is missing, ``--mesh`` is malformed, or the command does not
            accept the model.
    """
    from jaxvlm.config import ConfigError
    from jaxvlm.inference.encoder import Encoder
    from jaxvlm.inference.load import load
    from jaxvlm.parallel.distributed import processes
    from jaxvlm.parallel.mesh import mesh_config

    if not values.checkpoint:
        raise ConfigError(f"{command} needs --checkpoint: a workdir or a Hugging Face folder")
    mesh = mesh_config(values.mesh)
    processes.initialize()
    how = {"adapter": values.adapter, "dtype": values.dtype, "family": values.family}
    model = load(values.checkpoint, mesh=mesh, **how)
    if command not in EMBEDDINGS and isinstance(model, Encoder):
        raise ConfigError(
            f"--checkpoint={values.checkpoint} is an encoder, which computes embeddings; "
            "`jaxvlm embed` writes them"
        )
    return model


def say(text: str, end: str = "\n") -> None:
    """Print ``text`` in the process that reports, and nothing in the others."""
    from jaxvlm.parallel.distributed.processes import is_silent

    if not is_silent():
        print(text, end=end, flush=True)


class RecipeError(Exception):
    """A recipe raised an error, the cause of this one; the message says where and what."""


def _why(recipe: str, error: BaseException) -> str:
    """Say which line of a recipe raised ``error``, and what the error says."""
    if isinstance(error, (TypeError, ValueError)) and error.__context__ is not None:
        error = error.__context__  # behind ml_collections' own, whose text is a traceback
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if os.path.abspath(f.filename) == os.path.abspath(recipe)]
    where = f"{recipe}:{lines[-1]}" if lines else recipe
    advice = ""
    if isinstance(error, TypeError) and str(error).startswith("get_config() missing"):
        advice = f"; give its argument behind a colon, --config={recipe}:ARGUMENT"
    elif isinstance(error, TypeError) and str(error).startswith("get_config() takes"):
        advice = f"; what stands behind a colon is its argument, --config={recipe}:ARGUMENT"
    return f"the recipe {where}: {type(error).__name__}: {error}{advice}"


class RecipeParser(flags.ArgumentParser):
    """Loads a recipe as a locked ConfigDict, also where its get_config returns a dataclass.

    Args:
        loader: parser of ml_collections, which calls get_config.
        argv: arguments of the command, in which overrides are looked for.
    """

    def __init__(self, loader: flags.ArgumentParser, argv: list[str]):
        super().__init__()
        self.loader, self.argv = loader, argv

    def parse(self, argument: str) -> Any:
        """Call get_config of the file ``argument``; text after a colon is its own argument."""
        from jaxvlm.config import to_config_dict

        try:
            config = self.loader.parse(argument)
        except Exception as error:  # whatever a recipe, somebody's Python file, can raise
            raise RecipeError(_why(argument.partition(":")[0], error)) from error
        config = to_config_dict(config) if dataclasses.is_dataclass(config) else config
        if not isinstance(config, ml_collections.ConfigDict):
            return config  # raises where it is used, as for a file that is missing
        _complete_mixture(config)
        for given in self.argv:
            if override := re.match(r"--?(?:no)?config\.([\w.]+)", given):
                _add_groups(config, override[1].split("."))
        return config

    def flag_type(self) -> str:
        """Type in the help of the flag."""
        return self.loader.flag_type()


def _complete_mixture(config: ml_collections.ConfigDict) -> None:
    """Give each source of a mixture all its settings, with their types, so that each can be set."""
    from jaxvlm.config import SourceConfig, to_config_dict

    data = config.get("data")
    mixture = data.get("mixture") if isinstance(data, ml_collections.ConfigDict) else None
    if not isinstance(mixture, ml_collections.ConfigDict):
        return
    default = to_config_dict(SourceConfig()).to_dict()
    for name, given in mixture.items():
        if isinstance(given, ml_collections.ConfigDict):
            own = {
                key: float(x) if type(x) is int and isinstance(default.get(key), float) else x
                for key, x in given.items()
            }
            with mixture.unlocked():
                mixture[name] = ml_collections.ConfigDict(default | own)


def _add_groups(config: Any, path: list[str]) -> None:
    """Add the groups of an extension's options that an override sets a field of.

    Raises:
        ConfigError: there is no such group, or it is no group.
    """
    from jaxvlm.config import ConfigError

    for depth, name in enumerate(path):
        group = f"config.{'.'.join(path[:depth])}"
        if not isinstance(config, ml_collections.ConfigDict):
            raise ConfigError(
                f"{group} is {config!r}, and no group of settings, which config.{'.'.join(path)} "
                "would be in"
            )
        if depth == len(path) - 1:
            return
        if name not in config:
            if config.is_locked or "options" not in path[:depth]:
                near = difflib.get_close_matches(name, config, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(config)}"
                raise ConfigError(
                    f"{group.rstrip('.')} has no group of settings {name!r}; {advice}"
                )
            config[name] = ml_collections.ConfigDict()
        config = config[name]


def define_recipe(
    values: flags.FlagValues, argv: list[str], help_text: str, default: str | None = None
) -> None:
    """Declare ``--config`` and its overrides ``--config.a.b=value``.

    Unknown settings are refused by the recipe's ConfigDict, which is locked except for the options
    of extensions: of these, keys that the recipe does not have may be set too.

    Args:
        values: flags of the command.
        argv: arguments of the command, in which overrides are looked for.
        help_text: help of the flag.
        default: recipe that is used where the flag is not given.
    """
    config_flags.DEFINE_config_file(
        "config",
        None,
        help_text,
        flag_values=values,
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=["jaxvlm", *argv],
    )
    values["config"].parser = RecipeParser(values["config"].parser, argv)
    if default is not None:
        values.set_default("config", default)
