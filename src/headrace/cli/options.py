"""Options that several commands share, and groups of them that arrive as one parameter.

A parameter that is annotated with a `Group` stands for several options: `expanded` puts them in its place,
and what they make (where to print, which object store) arrives as one value.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from headrace.base.text import printable
from headrace.cli.printing import Output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.control.client import Endpoint


class Group:
    """Several options that arrive as one parameter.

    Args:
        make: takes them by name and returns the parameter's value.
        defaults: by name; where none is given, flags are False and others None.
        options: annotations by name.
    """

    def __init__(
        self, make: Callable[..., Any], defaults: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.make = make
        self.defaults = defaults or {}
        self.options: Mapping[str, Any] = options

    def parameters(self) -> list[inspect.Parameter]:
        """The options as a command's parameters."""
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotation,
                default=self.defaults.get(name, False if get_args(annotation)[0] is bool else None),
            )
            for name, annotation in self.options.items()
        ]


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: with each group's options in the group's place."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Group] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        metadata = getattr(parameter.annotation, "__metadata__", ())
        group = next((each for each in metadata if isinstance(each, Group)), None)
        if group is None:
            parameters.append(parameter)
        else:
            groups[parameter.name] = group
            parameters += group.parameters()
    if not groups:
        return command

    @functools.wraps(command)
    def flat(*words: Any, **given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group.make(**{option: given.pop(option) for option in group.options})
        return command(*words, **given)

    # typer reads both.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    del flat.__wrapped__
    return flat


class _Help:
    """Help that says what each word stands for (`DIR`, `N`), and each default in one way."""

    params: list[Any]
    get_params: Callable[..., list[Any]]
    options_metavar: str | None

    def __init__(self, *words: Any, **given: Any) -> None:
        super().__init__(*words, **given)
        for each in self.params:
            if each.metavar is None and not getattr(each, "is_flag", False):
                number = each.type_descriptor.annotation in (int, float)
                each.metavar = "N" if number else each.name.upper()
            if each.nargs == -1 and "..." not in each.metavar:
                each.metavar += "..."

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] STORE [PATTERN]`."""
        del ctx
        words = [each.metavar for each in self._arguments() if each.required]
        words += [_optional(each.metavar) for each in self._arguments() if not each.required]
        group = [self.subcommand_metavar] if isinstance(self, TyperGroup) else []
        return [self.options_metavar or "", *words, *group]

    def _arguments(self) -> list[Any]:
        return [each for each in self.params if each.param_type_name == "argument"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes what stands for itself, then options; of a group its commands, too."""
        rows = [(each.metavar, _about(each)) for each in self._arguments()]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        with formatter.section("Options"):
            options = [o for o in self.get_params(ctx) if o not in self._arguments()]
            formatter.write_dl([(_flags(o), _about(o)) for o in options if not o.hidden])
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


def _optional(words: str) -> str:
    return words if words.startswith("[") else f"[{words}]"


def _flags(option: Any) -> str:
    """`-n, --limit N`; of a pair `--tune / --no-tune`."""
    flags = [", ".join(sorted(each, key=len)) for each in (option.opts, option.secondary_opts)]
    metavar = "" if option.is_flag or option.count else f" {option.metavar}"
    return " / ".join(filter(None, flags)) + metavar


def limits_of(parameter: Any) -> str:
    """What a number may be; "" if any."""
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if least is None:
        return ""
    return f"at least {least:g}" if most is None else f"{least:g} to {most:g}"


def _about(parameter: Any) -> str:
    """What it is, and in brackets what holds without it and what it may be."""
    default, shown = parameter.default, parameter.show_default
    if isinstance(shown, bool) and getattr(parameter, "is_flag", False):
        pair = parameter.opts if default else parameter.secondary_opts
        shown = pair[0].lstrip("-") if parameter.secondary_opts else ""
    elif isinstance(shown, bool):
        shown = "" if not shown or default in (None, "", []) or parameter.required else default
    shown = f"{shown:g}" if isinstance(shown, float) else str(shown)
    required = parameter.required and parameter.param_type_name == "option"
    notes = [
        f"default: {shown}" if shown else "",
        limits_of(parameter),
        "may be repeated" if parameter.multiple else "",
        "required" if required else "",
    ]
    note = "; ".join(filter(None, notes))
    return " ".join(filter(None, (parameter.help, note and f"[{note}]")))


class Command(_Help, TyperCommand):
    """A command that does something."""


class _WholeLines(_Help, TyperGroup):
    """Says of each command all of its first line: typer cuts it to fit the terminal's."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        each = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in each if one])


class CommandGroup(typer.Typer):
    """A command that has commands of its own."""

    def __init__(self, about: str, *, no_args_is_help: bool = True) -> None:
        super().__init__(
            help=about, cls=_WholeLines, no_args_is_help=no_args_is_help, rich_markup_mode=None
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        """Adds a command whose parameters may be groups."""
        register = super().command(name, cls=Command, **settings)

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            register(expanded(function))
            return function

        return add


Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress, no remarks.")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Say more; errors with traceback.")]

JsonOutput = Annotated[Output, Group(Output, as_json=Json)]
QuietOutput = Annotated[Output, Group(Output, as_json=Json, quiet=Quiet)]
FullOutput = Annotated[Output, Group(Output, as_json=Json, quiet=Quiet, verbose=Verbose)]
"""Where the command prints, with the options that it has for that."""

ReportFile = Annotated[
    str | None, Option("--report", metavar="FILE", help="Write a report as JSON.")
]
"""Of commands that run a program: a file, since stdout is the program's."""

QuietEnd = Annotated[bool, Option("--quiet", "-q", help="Say nothing at the end.")]


def not_started(error: FileNotFoundError | PermissionError) -> int:
    """Say why a program did not start, and return the status that a shell has for it."""
    from headrace.posix.launch import NOT_EXECUTABLE, NOT_FOUND

    print(f"error: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
    print("  next: Check its name, or give its path; scripts: python SCRIPT.py.", file=sys.stderr)
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


# -- where data lies -------------------------------------------------------------------------------

_WORDS = {"true": True, "false": False, "none": None}


def storage_options(storage: list[str] | None) -> dict[str, Any] | None:
    """The options as the library takes them; None where none were given.

    Raises:
        ValueError: one is no KEY=VALUE, or a secret itself.
    """
    options: dict[str, Any] = {}
    for each in storage or []:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise ValueError(f"--storage-option is {each!r}, expected KEY=VALUE")
        if value.startswith("DHHC-1:"):  # every user of the machine can read a command line
            raise ValueError(
                f"--storage-option {key} is a secret on the command line. Use {key}=file:PATH or "
                f"{key}=env:NAME, or HEADRACE_DHCHAP_SECRET_FILE."
            )
        options[key] = _value(key, value)
    return options or None


def _value(key: str, text: str) -> Any:
    """Our own numbers as numbers; what the client gets stays text, which it parses itself."""
    from dataclasses import fields

    from headrace.io.objects.options import ReadPolicy

    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    kinds = {f.name: str(f.type) for f in fields(ReadPolicy)}
    if kinds.get(key) == "int":
        return int(text)
    return float(text) if kinds.get(key, "").startswith("float") else text


StorageOptions = Annotated[
    dict[str, Any] | None,
    Group(
        storage_options,
        storage=Annotated[
            list[str] | None,
            Option(
                "--storage-option",
                "-O",
                help="URLs: KEY=VALUE for the object store (endpoint, region, skip_signature, ...). "
                "Secrets belong into the environment (AWS_SECRET_ACCESS_KEY, ...).",
                metavar="KEY=VALUE",
            ),
        ],
    ),
]
"""Where an object store is and who asks, as the library takes it."""


def _endpoint(*, controller: str | None, **files: Path | None) -> Endpoint | None:
    if controller is None:
        return None
    from headrace.control.client import Endpoint

    given = {name.removeprefix("controller_"): path for name, path in files.items()}
    return Endpoint(url=controller, **given)


def controller_options(text: str, *flags: str, own: bool = False) -> Group:
    """Where a controller is: an `Endpoint`, or None; `own`: this user's where none is named.

    `flags` are for the token, the authority, the own certificate and its key, as many as there are.
    """
    texts = {
        "token_file": "Holds the token for it.", "ca": "Authority of its certificate.",
        "certificate": "Own certificate.", "key": "Its key.",
    }  # fmt: skip
    options = {
        f"controller_{name}": Annotated[Path | None, Option(flag, help=help_text, metavar="FILE")]
        for (name, help_text), flag in zip(texts.items(), flags, strict=False)
    }
    where = Option("--controller", help=text, metavar="ADDRESS", show_default=own)
    defaults = {"controller": "own"} if own else {}
    return Group(_endpoint, defaults, controller=Annotated[str | None, where], **options)


TrustOptions = Annotated[
    list[str] | None,
    Option(
        "--trust",
        help="A folder, file or URL that a store made elsewhere may read, once and from now on.",
        metavar="PLACE",
    ),
]


def endings_of(text: str) -> tuple[str, ...]:
    """What `--ext` says: `jpg,.png` is `.jpg` and `.png`."""
    endings = [each.strip().lstrip(".") for each in text.split(",")]
    return tuple(f".{each}" for each in endings if each)
