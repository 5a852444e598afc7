"""Builds a stage of a Dockerfile without Docker: each stage is a folder, each command a chroot.

    base(debian:12-slim) ──copy──▶ folder/base ──copy──▶ folder/builder ──copy──▶ ...
                                        RUN, COPY           RUN, COPY

Commands run in namespaces of their own (processes, mounts, memory), so that the first one is
process 1 as in a container, and nothing of it is left when it ends. It needs root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from tests.image.build_context import BuildContext
from tests.image.dockerfile import Dockerfile, Instruction, expand

# What `docker run` mounts; the memory has Docker's size.
_ENTER = (
    'mount -t proc proc "$0/proc"'
    ' && mount -t tmpfs -o size=64m,mode=1777 shm "$0/dev/shm"'
    ' && exec chroot --userspec="$1" --groups= "$0" "${@:2}"'
)
_NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
_TAIL = 6000  # characters of a failed command's output
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Image:
    """Holds a built stage: its files, and how a container of it starts."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)  # ARG's, while it is built
    folder: str = "/"
    user: str = "0:0"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def run_command(self, *arguments: str, user: str = "") -> list[str]:
        """Returns the command of `docker run [--user USER] IMAGE ARGUMENTS`."""
        return self.chroot_command([*self.entrypoint, *(arguments or self.command)], user=user)

    def chroot_command(
        self, words: Sequence[str], user: str = "", more: Mapping[str, str] | None = None
    ) -> list[str]:
        """Returns the command that runs `words` in the image, as process 1."""
        variables = {**self.environment, **(more or {})}
        settings = [f"{name}={value}" for name, value in variables.items()]
        inside = ["env", "-i", "-C", self.folder, *settings, *words]
        user = user or self.user
        return [*_NAMESPACES, "bash", "-c", _ENTER, str(self.root), user, *inside]


@dataclass(frozen=True)
class Machine:
    """Holds what a build takes over from the machine to reach packages.

    Attributes:
      secrets: files for RUN --mount=type=secret, by id.
      variables: proxies and the like, which Docker passes to every RUN.
      prepare: puts more of it into a new root file system, such as the settings of apt.
    """

    secrets: Mapping[str, Path]
    variables: Mapping[str, str]
    prepare: Callable[[Path], None]


class ImageBuild:
    """Builds stages, each once, in a folder."""

    def __init__(
        self,
        dockerfile: Dockerfile,
        context: BuildContext,
        folder: Path,
        base: Callable[[str, Path], None],
        machine: Machine,
    ) -> None:
        """Prepares; nothing is built yet.

        Args:
          dockerfile: what to build.
          context: the files that COPY takes.
          folder: where the stages' file systems go.
          base: makes the root file system of an image that no stage is called, by its name.
          machine: how packages are reached.
        """
        self._dockerfile = dockerfile
        self._context = context
        self._folder = folder
        self._base = base
        self._machine = machine
        self._built: dict[str, Image] = {}

    def stage(self, name: str) -> Image:
        """Returns a stage, built with all that it needs.

        Raises:
          RuntimeError: a command failed; shows the end of its output.
        """
        if name not in self._built:
            stage = self._dockerfile.stages[name]
            root = self._folder / name
            if stage.parent in self._dockerfile.stages:
                parent = self.stage(stage.parent)
                _call("cp", "-a", "--reflink=auto", parent.root, root)
                image = dataclasses.replace(
                    parent,
                    root=root,
                    environment=dict(parent.environment),
                    arguments=dict(parent.arguments),
                )
            else:
                self._base(stage.parent, root)
                self._machine.prepare(root)
                image = Image(root)
            for instruction in stage.instructions:
                self._carry_out(instruction, image)
            self._built[name] = image
        return self._built[name]

    def _carry_out(self, instruction: Instruction, image: Image) -> None:
        text, words = instruction.text, instruction.exec_form()
        if instruction.keyword == "RUN":
            self._run(instruction, image)
        elif instruction.keyword == "COPY":
            self._copy(instruction, image)
        elif instruction.keyword == "ENV":
            image.environment.update(
                {
                    name: expand(value, {**image.arguments, **image.environment})
                    for name, value in instruction.pairs().items()
                }
            )
        elif instruction.keyword == "ARG":
            image.arguments.update(instruction.pairs())
        elif instruction.keyword == "WORKDIR":
            image.folder = os.path.join(image.folder, text)
            _inside(image, ".").mkdir(parents=True, exist_ok=True)
        elif instruction.keyword == "USER":
            image.user = text
        elif instruction.keyword == "SHELL":
            image.shell = words or []
        elif instruction.keyword == "ENTRYPOINT":
            image.entrypoint = words or [*image.shell, text]
        elif instruction.keyword == "CMD":
            image.command = words or [*image.shell, text]
        elif instruction.keyword not in ("LABEL", "HEALTHCHECK"):
            raise ValueError(f"line {instruction.line}: no {instruction.keyword} here")

    def _run(self, instruction: Instruction, image: Image) -> None:
        words = [*image.shell, instruction.text]
        command = image.chroot_command(words, more=self._machine.variables)
        with contextlib.ExitStack() as mounts:
            for options in instruction.mounts():
                mounts.enter_context(self._mounted(options, image))
            finished = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
            )
        if finished.returncode:
            printed = (finished.stdout + finished.stderr)[-_TAIL:]
            raise RuntimeError(
                f"line {instruction.line}: {instruction.text}\n"
                f"ended with exit code {finished.returncode}:\n{printed}"
            )

    @contextlib.contextmanager
    def _mounted(self, options: dict[str, str], image: Image) -> Iterator[None]:
        """Puts a copy of what a RUN mounts in its place, and takes it away afterwards."""
        kind, target = options["type"], _inside(image, options["target"])
        if kind not in ("bind", "cache", "secret"):
            raise ValueError(f"no mount of type {kind} here")
        if kind == "cache" or (kind == "secret" and options["id"] not in self._machine.secrets):
            yield
            return
        covered = target.with_name(f"{target.name}.covered")
        if target.exists():
            target.rename(covered)
        if kind == "secret":
            shutil.copy(self._machine.secrets[options["id"]], target)
        else:
            self._copy_tree(options.get("from"), options.get("source", ""), target)
        yield
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        if covered.exists():
            covered.rename(target)

    def _copy(self, instruction: Instruction, image: Image) -> None:
        *sources, place = shlex.split(instruction.text)
        target = _inside(image, place)
        for source in sources:
            self._copy_tree(
                instruction.flag("from"), source, target, into=place.endswith("/"), must_exist=True
            )
            if instruction.flag("chmod"):
                _call("chmod", "-R", instruction.flag("chmod"), target)

    def _copy_tree(
        self,
        stage: str | None,
        source: str,
        target: Path,
        into: bool = False,
        must_exist: bool = False,
    ) -> None:
        """Copies a file, or what is in a folder, of a stage or of the build context.

        Args:
          stage: the stage's name; None: the context.
          source: the path there.
          target: the new file or folder.
          into: a file goes into the folder `target`.
          must_exist: it is an error if nothing is there.
        """
        if stage:
            origin = self.stage(stage).root / source.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            _call("cp", "-a", "--reflink=auto", f"{origin}/.", target)
            return
        files = self._context.files(source)
        if must_exist and not files:
            raise FileNotFoundError(f"COPY {source}: it is not in the build context")
        for path in files:
            if path == source:
                copy = target / os.path.basename(path) if into else target
            else:
                copy = target / os.path.relpath(path, source or ".")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._context.root / path, copy, follow_symlinks=False)
            os.chown(copy, 0, 0, follow_symlinks=False)


def _inside(image: Image, path: str) -> Path:
    """Returns where a path of the image lies on this machine."""
    return image.root / os.path.normpath(os.path.join(image.folder, path)).lstrip("/")


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)
