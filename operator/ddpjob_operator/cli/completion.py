"""Completion for three shells and for `kubectl ddpjob`: verbs, options, their values, names of jobs and nodes.

The shells' scripts call `ddpjob __complete WORD...`, with the words before the cursor and the one that it is in, as
those of cobra do; kubectl calls `kubectl_complete-ddpjob` in the same way. Errors are silent: a message would end up in
the line that is being typed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

HIDDEN: Final = "__complete"
SECONDS_FOR_NAMES = 0.8
"""With the start of Python, a person waits a second at most."""
_NO_FILES, _FILES = 4, 0
"""What kubectl does where there is no candidate (cobra's ShellCompDirective)."""

_BASH = """\
_ddpjob_completion() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\\t'*}")
    done < <(ddpjob __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _ddpjob_completion ddpjob
"""
_ZSH = """\
#compdef ddpjob
_ddpjob() {
    local -a found
    found=("${(@f)$(ddpjob __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        found=("${(@)found//:/\\\\:}")
        found=("${(@)found//$'\\t'/:}")
        _describe ddpjob found
    else
        _files
    fi
}
if [[ "$funcstack[1]" == "_ddpjob" ]]; then
    _ddpjob "$@"
else
    compdef _ddpjob ddpjob
fi
"""
_FISH = """\
function __ddpjob_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (ddpjob __complete $words[2..-1] 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c ddpjob -f -a '(__ddpjob_complete)'
"""
SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a word may become, and what it means."""

    value: str
    meaning: str = ""

    def line(self) -> str:
        return f"{self.value}\t{self.meaning}" if self.meaning else self.value


@dataclass(slots=True)
class Place:
    """Where in the command line the cursor is."""

    command: Any
    """Of typer: the one that the words before have led to."""
    option: Any = None
    """The option whose value the word is."""
    positional: int = 0
    """How many arguments of the command are there already."""
    given: dict[str, str] = field(default_factory=dict)
    """Values of options that are there already."""


def place_of(root: Any, words: Sequence[str]) -> Place | None:
    """Where the last of the words is; None after one that is no verb."""
    place = Place(root)
    for word in words[:-1]:
        if place.option is not None:
            place.given[place.option.name] = word
            place.option = None
        elif word.startswith("-") and word != "-":
            name, has_value, value = word.partition("=")
            option = _option(place.command, name)
            if option is not None and has_value:
                place.given[option.name] = value
            elif option is not None and not option.is_flag:
                place.option = option
        elif hasattr(place.command, "commands"):
            if word not in place.command.commands:
                return None
            place.command = place.command.commands[word]
        else:
            place.positional += 1
    return place


def candidates(place: Place, word: str, names: Sequence[Candidate] = ()) -> list[Candidate]:
    """What `word` may become at this place. Names are those of the cluster: of jobs or of nodes, as belong there."""
    return [found for found in _candidates(place, word, names) if found.value.startswith(word)]


def wants_jobs(place: Place, word: str) -> bool:
    """Whether the word is the name of a job on a cluster."""
    return "shared" not in place.given and _argument(place, word) == "name"


def wants_nodes(place: Place, word: str) -> bool:
    """Whether the word is the name of a Kubernetes node."""
    return _argument(place, word) == "node"


def _argument(place: Place, word: str) -> str | None:
    """Name of the argument that the word is; None if it is something else."""
    if place.option is not None or word.startswith("-"):
        return None
    arguments = _parameters(place.command, "argument")
    return str(arguments[place.positional].name) if place.positional < len(arguments) else None


def _candidates(place: Place, word: str, names: Sequence[Candidate]) -> Iterator[Candidate]:
    if place.option is not None:
        yield from map(Candidate, choices(place.option))
    elif word.startswith("-"):
        name, has_value, _ = word.partition("=")
        if has_value:
            option = _option(place.command, name)
            yield from (Candidate(f"{name}={choice}") for choice in (choices(option) if option is not None else ()))
            return
        for option in _parameters(place.command, "option"):
            if not option.hidden:
                yield from (Candidate(name, option.help or "") for name in option.opts if name.startswith("--"))
        yield Candidate("--help", "Show the help and exit.")
    elif hasattr(place.command, "commands"):
        for name, command in place.command.commands.items():
            if not command.hidden:
                yield Candidate(name, (command.help or "").strip().partition("\n")[0])
    elif wants_jobs(place, word) or wants_nodes(place, word):
        yield from names
    else:
        arguments = _parameters(place.command, "argument")
        if place.positional < len(arguments):
            yield from map(Candidate, choices(arguments[place.positional]))


def _parameters(command: Any, kind: str) -> list[Any]:
    return [each for each in command.params if each.param_type_name == kind]


def _option(command: Any, name: str) -> Any:
    return next((each for each in _parameters(command, "option") if name in each.opts), None)


def choices(parameter: Any) -> list[str]:
    """Values of a parameter that is an Enum, which versions of typer keep in different places."""
    of_click = getattr(getattr(parameter, "type", None), "choices", None)
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    found = of_click or (list(annotation) if isinstance(annotation, type) and issubclass(annotation, Enum) else ())
    return [str(choice.value if isinstance(choice, Enum) else choice) for choice in found]


def complete(root: Any, words: Sequence[str]) -> list[Candidate]:
    """Candidates for the last of the words, with names of jobs or nodes from the cluster where one belongs."""
    words = words or ("",)
    place = place_of(root, words)
    if place is None:
        return []
    names: list[Candidate] = []
    if (nodes := wants_nodes(place, words[-1])) or wants_jobs(place, words[-1]):
        # a login plugin or a resolver may block for longer than anything here can interrupt
        reading = threading.Thread(target=_names_into, args=(place, names, nodes), daemon=True)
        reading.start()
        reading.join(SECONDS_FOR_NAMES)
    return candidates(place, words[-1], tuple(names))


def _names_into(place: Place, names: list[Candidate], nodes: bool) -> None:
    with suppress(Exception):
        asyncio.run(_read_names(place, names, nodes))


async def _read_names(place: Place, into: list[Candidate], nodes: bool) -> None:
    """Put names of nodes, or of jobs with their phase, into `into`, as many as the cluster sends in time."""
    from ddpjob_operator.cluster import paths
    from ddpjob_operator.runtime.client import METADATA_LIST, connect
    from ddpjob_operator.runtime.login import CLI
    from ddpjob_operator.runtime.paths import collection

    if kubeconfig := place.given.get("kubeconfig"):
        os.environ["KUBECONFIG"] = kubeconfig
    client = await connect(context=place.given.get("context"), agent=CLI)
    try:
        if nodes:
            async for page in client.pages(collection("v1", "nodes", None), "nodes", accept=METADATA_LIST):
                into += (Candidate(node["metadata"]["name"]) for node in page.items)
            return
        async for page in client.pages(paths.jobs(place.given.get("namespace") or client.namespace), "ddpjobs"):
            into += (Candidate(job["metadata"]["name"], _phase(job)) for job in page.items)
    finally:
        await client.close()


def print_candidates(root: Any, words: Sequence[str]) -> None:
    """`ddpjob __complete`."""
    for found in complete(root, words):
        print(found.line())


def print_for_kubectl(root: Any, words: Sequence[str]) -> None:
    """`kubectl_complete-ddpjob`, in cobra's form."""
    found = complete(root, words)
    for candidate in found:
        print(candidate.line())
    print(f":{_NO_FILES if found else _FILES}")


def _phase(job: Any) -> str:
    return str((job.get("status") or {}).get("phase") or "")
