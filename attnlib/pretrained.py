# Made from book/20_gpt2.ipynb by tools/bookkit; see CONTRIBUTING.md.
"""Reading a trained model from its folder: config.json and safetensors files.

What does not fit is refused by name before memory is taken; then one tensor is read at a
time. Nothing is ever unpickled.

Derived in chapter 20, "GPT-2, from its own file" (book/20_gpt2.ipynb).
"""

import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from attnlib.checks import changed_options


@dataclass(frozen=True)
class Into:
    """Where a tensor of a file goes.

    Args:
        parameters: the parameters that it is cut into, along its last dimension as they
            have it, each as wide as it is here.
        transposed: whether the file has the transpose, as of an `nn.Linear` for a
            `Projection`.

    Source: chapter 20, eq-conv1d.
    """

    parameters: tuple[str, ...]
    transposed: bool = False

    def shape(self, here: Mapping[str, nn.Parameter]) -> tuple[int, ...]:
        """The shape that the file must have, if the model has these parameters."""
        shapes = [tuple(here[name].shape) for name in self.parameters]
        whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return whole[::-1] if self.transposed else whole

    def parts(self, whole: Tensor, here: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """The pieces of the file's tensor, one for each parameter, as views."""
        whole = whole.T if self.transposed else whole
        return list(whole.split([here[p].shape[-1] for p in self.parameters], dim=-1))


def require_library(name: str) -> ModuleType:
    """Returns a library that the package does without until a model is loaded.

    Raises:
        ImportError: it is not installed.

    Source: chapter 20.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        wanted = "to load models, run: pip install attnlib[models]"
        raise ImportError(f"{name}: not installed; {wanted}") from error


def read_config(
    folder: str | Path, ignore: Collection[str] = (), file: str = "config.json"
) -> dict[str, Any]:
    """What the file config.json of a model's folder says.

    Args:
        folder: where it is.
        ignore: names in it that are passed over.
        file: another file of the same form.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not one JSON object.

    Source: chapter 20.
    """
    path = Path(folder) / file
    if not path.is_file():
        raise FileNotFoundError(f"folder: expected a file {file} in {folder}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected JSON, but {error}") from error
    if not isinstance(config, dict):
        got = type(config).__name__
        raise ValueError(f"{file}: expected an object with names, got a {got}")
    if isinstance(ignore, str):
        raise TypeError(f"ignore: expected several names, got the text {ignore!r}")
    return {name: value for name, value in config.items() if name not in ignore}


# What changes nothing of what a model computes: who wrote a file, other tasks and layers,
# how text is made of it, training.
NOTES = ("architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
NOTES += ("_name_or_path", "_model_name_or_path", "name_or_path", "_commit_hash")
NOTES += ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation")
NOTES += ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id")
NOTES += ("cls_token_id", "mask_token_id", "decoder_start_token_id", "tokenizer_class")
NOTES += ("task_specific_params", "id2label", "label2id", "problem_type", "_num_labels")
NOTES += ("finetuning_task", "num_labels", "gradient_checkpointing", "initializer_range")
NOTES += ("output_attentions", "output_hidden_states", "return_dict", "output_past")
NOTES += ("pretraining_tp", "unsloth_version", "unsloth_fixed", "transformers.js_config")
NOTES += ("torchscript", "use_bfloat16", "prefix", "keys_to_ignore_at_inference")
LARGEST = 2**31 - 1  # of a size in config.json


def refuse_unknown_config(
    config: Mapping[str, Any],
    needed: Mapping[str, type | tuple[type, ...]],
    fixed: Mapping[str, Collection[Any]],
    ignored: Collection[str],
) -> None:
    """Refuses a configuration that asks for anything that a model would not do.

    Args:
        config: from `read_config`.
        needed: names that must be there, with the types that they may have.
        fixed: names that may be there, with the values that are supported.
        ignored: names that are read elsewhere or change nothing, beside `NOTES`. What is
            `null` asks for nothing either, except under a fixed name.

    Raises:
        TypeError: a needed value has another type.
        ValueError: a name is missing or unknown, or a value is not supported.

    Source: chapter 20.
    """
    for name, known in fixed.items():
        value = config.get(name)
        good = any(value == x and type(value) is type(x) for x in known)
        if name in config and not good:
            wanted = " or ".join(map(repr, known))
            raise ValueError(
                f"config.json: expected {name} = {wanted}, got {value!r}, which is not "
                "supported"
            )
    for name, types in needed.items():
        if config.get(name) is None:
            raise ValueError(f"config.json: expected {name}, which is missing")
        value, allowed = config[name], types if isinstance(types, tuple) else (types,)
        if not isinstance(value, allowed) or (
            isinstance(value, bool) and bool not in allowed
        ):
            wanted = " or ".join(t.__name__ for t in allowed)
            raise TypeError(f"config.json: expected {name} as {wanted}, got {value!r}")
        if isinstance(value, int) and value > LARGEST:
            raise ValueError(f"config.json: expected {name} up to {LARGEST}, got {value}")
    for name, value in config.items():
        if value is not None and name not in (*fixed, *needed, *ignored, *NOTES):
            raise ValueError(
                f"config.json: {name} = {value!r} is unknown here, and might change what "
                f"the model computes; if it does not, pass ignore=[{name!r}]"
            )


# What a header calls a type, in PyTorch's words.
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder by name; each is read when it is asked for, and not kept.

    Attributes:
        files: the file of each.
        shapes: the shape of each.
        dtypes: the dtype of each, or its name in the file where PyTorch has none here.

    Source: chapter 20, eq-safetensors.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | str] = {}

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.files)

    def __iter__(self) -> Iterator[str]:
        """Their names, file by file."""
        return iter(self.files)

    def __contains__(self, name: object) -> bool:
        """Whether there is one of that name; nothing is read."""
        return name in self.files

    def __getitem__(self, name: str) -> Tensor:
        """Reads one tensor. Its memory is the file's: copy what you want to keep.

        Raises:
            KeyError: there is none of that name.
        """
        with opened(self.files[name]) as file:  # closed again, so that memory is released
            return file.get_tensor(name)

    def add_file(self, path: Path) -> None:
        """Adds what the header of a file announces.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is cut off or malformed, or has a name that was there before.
        """
        with opened(path) as file:
            for name in file.offset_keys():  # in the order of the bytes
                if name in self.files:
                    was = self.files[name].name
                    raise ValueError(
                        f"{path.name}: expected {name} once, it is in {was}, too"
                    )
                part = file.get_slice(name)
                self.files[name], self.shapes[name] = path, tuple(part.get_shape())
                self.dtypes[name] = DTYPES.get(part.get_dtype(), part.get_dtype())


def opened(path: Path) -> Any:
    """A safetensors file whose header has been read and compared with its length.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut off or malformed.

    Source: chapter 20, eq-safetensors.
    """
    library = require_library("safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"{path.name}: expected this file in {path.parent}")
    try:
        return library.safe_open(path, framework="pt")
    except library.SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(
            f"{path.name}: expected a whole safetensors file, got {size} bytes: {error}"
        ) from error


def read_tensors(folder: str | Path) -> Tensors:
    """What the safetensors files of a model's folder hold, as far as their headers tell.

    The folder has one file, model.safetensors, or several, and an index that says which
    tensor is in which.

    Raises:
        FileNotFoundError: no such file, or one that the index names is missing.
        ValueError: a file is cut off or malformed, or the index says something else than
            the files.

    Source: chapter 20, eq-safetensors.
    """
    folder, tensors = Path(folder), Tensors()
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        tensors.add_file(single)
        return tensors
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle, which may run code" if pickled else ""
        raise FileNotFoundError(f"folder: expected {single.name} in {folder}{hint}")
    places = read_index(index)
    for file in sorted(set(places.values())):
        tensors.add_file(folder / file)
    for name, file in places.items():
        if name not in tensors or tensors.files[name].name != file:
            raise ValueError(
                f"{file}: expected {name}, as {index.name} says; it is missing"
            )
    for name, path in tensors.files.items():
        if name not in places:
            raise ValueError(f"{path.name}: {name} is not in {index.name}")
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """In which file each tensor is, from the index of a model in several files.

    Raises:
        ValueError: it is no index, or names a file outside of its folder.

    Source: chapter 20.
    """
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: expected JSON with a weight_map") from error
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{path.name}: expected a weight_map with names and files")
    for name, file in places.items():
        plain = isinstance(file, str) and file == Path(file).name and "\\" not in file
        if not plain or not file.endswith(".safetensors"):
            wanted = "a safetensors file of the same folder"
            raise ValueError(f"{path.name}: expected {wanted} for {name}, got {file!r}")
    return places


Report = Callable[[str, int, int], None]  # called with a name, the numbers read, and all


def load_into(
    module: nn.Module,
    tensors: Tensors,
    names: Mapping[str, str | Into],
    *,
    ignored: Collection[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    report: Report | None = None,
) -> None:
    """Fills the parameters of a module from files, one tensor at a time.

    Everything is compared first: names, shapes and types. A module made under
    `torch.device("meta")` has no memory before, and gets it tensor by tensor: together the
    size of the model, and one tensor.

    Args:
        module: its parameters are replaced, with the same requires_grad.
        tensors: from `read_tensors`.
        names: for each tensor of the files where it goes, the name of a parameter or an
            `Into`; for each parameter of the module exactly one.
        ignored: names in the files that the model does not need.
        dtype: what the parameters become; `None` means as in the files, if all have one.
        device: where they go; `None` means the CPU.
        report: told after each tensor; `None` means `Progress()`, which prints to stderr
            what takes more than some seconds.

    Raises:
        TypeError: a tensor without floating-point numbers, or of different types; or dtype
            is none of floating point.
        ValueError: a tensor is missing, in surplus, or has another shape.

    Source: chapter 20.
    """
    plan = {n: Into((to,)) if isinstance(to, str) else to for n, to in names.items()}
    here = dict(module.named_parameters())
    refuse_misfits(here, tensors, plan, ignored)
    if dtype is None:
        dtype = require_one_dtype(tensors, plan)
    elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype: expected a torch.dtype of floating point, got {dtype!r}")
    report = report or Progress()
    sizes = {name: math.prod(tensors.shapes[name]) for name in plan}
    done, total = 0, sum(sizes.values())
    for name in (name for name in tensors if name in plan):  # in the order of the files
        parts = plan[name].parts(tensors[name], here)
        for parameter, part in zip(plan[name].parameters, parts, strict=True):
            order = torch.contiguous_format  # a transposed part, too
            fresh = part.to(device or "cpu", dtype, copy=True, memory_format=order)
            put_parameter(module, parameter, fresh, here[parameter].requires_grad)
        del parts, part  # so that the file's memory is released before the next
        done += sizes[name]
        report(name, done, total)


def put_parameter(module: nn.Module, name: str, value: Tensor, requires_grad: bool) -> None:
    """Replaces a parameter, given by its full name.

    Source: chapter 20.
    """
    owner, _, last = name.rpartition(".")
    fresh = nn.Parameter(value, requires_grad=requires_grad)
    module.get_submodule(owner).register_parameter(last, fresh)


def order_memory(model: nn.Module) -> None:
    """Puts matrices into the order in which a CPU multiplies few tokens by them fastest.

    A matrix W, and the table of tokens where it makes the logits, goes row after row if a
    row is longer than a column, otherwise column after column, as `nn.Linear` has it; in
    types of two bytes, always the latter. The numbers stay the same.

    It is for a model that only writes: what goes column after column is not contiguous, and
    `torch.nn.utils.parameters_to_vector` and `torch.optim.LBFGS` refuse such a parameter.

    Args:
        model: a language model; without a `head`, its token embedding makes the logits.

    Source: chapter 20.
    """
    table = model.token_embedding.weight
    if table.device.type != "cpu":
        return
    for name, weight in model.named_parameters():
        if name.endswith(".W"):
            weight.data = along_the_longer(weight.data)
    if getattr(model, "head", None) is None:
        table.data = along_the_longer(table.data.T).T  # the logits are x @ table.T


def along_the_longer(matrix: Tensor) -> Tensor:
    """The same matrix, its memory in the order of `order_memory`.

    Source: chapter 20.
    """
    rows, columns = matrix.shape
    by_rows = matrix.itemsize > 2 and columns > rows
    return matrix.contiguous() if by_rows else matrix.T.contiguous().T


def refuse_misfits(
    here: Mapping[str, nn.Parameter],
    tensors: Tensors,
    plan: Mapping[str, Into],
    ignored: Collection[str],
) -> None:
    """Refuses files that are not those of this model, before anything is read.

    Args:
        here: the parameters of the model, by name.
        tensors, plan, ignored: as for `load_into`.

    Raises:
        TypeError: a tensor without floating-point numbers.
        ValueError: a tensor is missing, in surplus, or has another shape; or the plan does
            not fill each parameter once.

    Source: chapter 20.
    """
    filled = sorted(name for into in plan.values() for name in into.parameters)
    if filled != sorted(here):
        odd = sorted(set(filled) ^ set(here)) or filled
        raise ValueError(f"names: expected each parameter once, see {odd[0]}")
    for name, into in plan.items():
        if name not in tensors:
            raise ValueError(f"{name}: expected this tensor in the files, it is missing")
        file, wanted = tensors.files[name].name, into.shape(here)
        if tensors.shapes[name] != wanted:
            raise ValueError(
                f"{name}: expected shape {wanted}, got {tensors.shapes[name]} in {file}"
            )
        dtype = tensors.dtypes[name]
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"{name}: expected floating point, got {dtype} in {file}")
    for name, path in tensors.files.items():
        if name not in plan and name not in ignored:
            raise ValueError(f"{name}: in {path.name}, but this model has no such tensor")


def require_one_dtype(tensors: Tensors, plan: Mapping[str, Into]) -> torch.dtype:
    """The dtype of all tensors that are to be read.

    Raises:
        TypeError: they differ.

    Source: chapter 20.
    """
    first, *others = plan
    for name in others:
        if tensors.dtypes[name] != tensors.dtypes[first]:
            raise TypeError(
                f"{name}: expected {tensors.dtypes[first]} as {first}, got "
                f"{tensors.dtypes[name]}; to convert them all, give dtype"
            )
    return tensors.dtypes[first]


def refuse_more_layers(layers: int, tensors: Tensors) -> None:
    """Refuses a model with more blocks than its files have, before it is made.

    Raises:
        ValueError: config.json asks for more.

    Source: chapter 20.
    """
    numbers = (re.search(r"\b(?:layers|h)\.(\d+)\.", name) for name in tensors)
    found = len({number[1] for number in numbers if number})
    if layers > found:
        raise ValueError(
            f"config.json: expected {found} layers, as the files have, got {layers}"
        )


def refuse_another_head(tensors: Tensors, tokens: str) -> None:
    """Refuses a file whose logits are made by another matrix than its tokens'.

    Args:
        tensors: from `read_tensors`.
        tokens: the name of the tokens' matrix, which the model uses for the logits, too.

    Raises:
        ValueError: there is a tensor lm_head.weight with other numbers.

    Source: chapter 20; chapter 9, eq-tied-logits.
    """
    head = "lm_head.weight"
    if head in tensors and tokens in tensors:
        same = tensors.shapes[head] == tensors.shapes[tokens]
        if not same or not torch.equal(tensors[head], tensors[tokens]):
            raise ValueError(f"{head}: expected the numbers of {tokens}, got others")


def refuse_other_heads(heads: nn.Module, window: int | None = None) -> None:
    """Refuses heads with which a trained model would compute something else.

    Args:
        heads: one attention for all heads, or an `nn.ModuleList` with one for each.
        window: how many tokens a query of the model sees; `None` means all.

    Raises:
        ValueError: a head has parameters, of which the files know nothing, or an option
            that changes the numbers and is another than the model's. Its dropout, which
            acts in training only, may be.

    Source: chapter 20.
    """
    theirs = {"causal": True, "window": window}
    for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
        if any(True for _ in head.parameters()):
            raise ValueError(
                "attention: expected one without parameters, since the files have none "
                f"for it, got {type(head).__name__}"
            )
        for name, neutral, got in changed_options(head):
            wanted = theirs.get(name, neutral)
            if name != "dropout" and got != wanted:
                raise ValueError(f"attention: expected {name}={wanted}, got {got}")


class Progress:
    """Prints how much of a model has been read, once it has taken some seconds.

    Args:
        after: seconds before the first line, and between two lines.

    Source: chapter 20.
    """

    def __init__(self, after: float = 2.0) -> None:
        self.after, self.last, self.shown = after, time.monotonic(), False

    def __call__(self, name: str, done: int, total: int) -> None:
        """Told after each tensor: its name, the numbers read so far, and all."""
        if time.monotonic() - self.last >= self.after or (self.shown and done == total):
            self.last, self.shown = time.monotonic(), True
            percent = 100 * done // total
            print(f"attnlib: {percent} % of {total:,} numbers read", file=sys.stderr)


def read_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model's folder, a `tokenizers.Tokenizer`, from tokenizer.json.

    It cuts no text and fills none up, whatever the file says.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the library tokenizers is not installed.
        ValueError: the library can't read it.

    Source: chapter 20.
    """
    library = require_library("tokenizers")
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"folder: expected a file tokenizer.json in {folder}")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path.name}: expected a tokenizer, but {error}") from error
    tokenizer.no_truncation()  # whoever trained may have left both in the file
    tokenizer.no_padding()
    return tokenizer


# What generation_config.json may say without a change of what is written: lengths, which
# are the caller's, what no text has, and how transformers goes about it.
NO_CHOICE = ("max_length", "max_new_tokens", "max_time", "pad_token_id", "bos_token_id")
NO_CHOICE += (
    "transformers_version",
    "_from_model_config",
    "use_cache",
    "trust_remote_code",
)
NO_CHOICE += (
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "num_return_sequences",
)
NO_CHOICE += ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
NO_CHOICE += ("return_dict_in_generate", "remove_invalid_values", "decoder_start_token_id")
NO_CHOICE += ("early_stopping", "length_penalty", "disable_compile", "compile_config")
NEUTRAL = {"num_beams": 1, "num_beam_groups": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0}
NEUTRAL |= {"eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0}
NEUTRAL |= {"min_length": 0, "min_new_tokens": 0, "encoder_repetition_penalty": 1.0}
NEUTRAL |= {"diversity_penalty": 0.0, "renormalize_logits": False, "guidance_scale": 1.0}
NEUTRAL |= {"token_healing": False, "low_memory": False}


def read_generation_config(folder: str | Path) -> dict[str, Any]:
    """How a model's makers let it write, as arguments of `stream`, from their own file.

    What the file does not say is as in transformers: the likeliest token without
    `do_sample`, and with it one of the likeliest 50.

    Raises:
        FileNotFoundError: there is no file generation_config.json.
        ValueError: it is not one JSON object, or asks for what `stream` does not do.

    Source: chapter 20.
    """
    config = read_config(folder, NO_CHOICE, "generation_config.json")
    asked = {name: value for name, value in config.items() if value is not None}
    drawn = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    drawn = {name: asked.pop(name, usual) for name, usual in drawn.items()}
    choice: dict[str, Any] = {"temperature": 0.0}
    if asked.pop("do_sample", False):
        choice = drawn | {"top_k": drawn["top_k"] or None}  # there, 0 stands for all
    choice["repetition_penalty"] = asked.pop("repetition_penalty", 1.0)
    ends, texts = asked.pop("eos_token_id", []), asked.pop("stop_strings", [])
    choice["stop"] = [*(ends if isinstance(ends, list) else [ends])]
    choice["stop"] += [texts] if isinstance(texts, str) else texts
    choice["bias"] = dict.fromkeys(asked.pop("suppress_tokens", []), -math.inf)
    unknown = {n: v for n, v in asked.items() if n not in NEUTRAL or v != NEUTRAL[n]}
    if unknown:
        wanted = "expected nothing that stream does not do"
        raise ValueError(f"generation_config.json: {wanted}, got {unknown}")
    return choice
