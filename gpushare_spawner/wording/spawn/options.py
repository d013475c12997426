"""What is wrong with the options of a spawn, and what would be right: for the form, the page and the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LONGEST_SHOWN = 80
"""Characters of a wrong value that are shown at most."""
TEMPLATES_AWAITED = (
    "This hub has no compute templates yet, so no server is started. Try again in a few minutes, or ask the admin of "
    "this hub."
)
NO_TEMPLATE = "There is no compute template that you may use. Ask the admin of this hub."


def templates_awaited(folder: str) -> str:
    """Return for the hub's log what is waited for. ``folder``: of the templates."""
    return (
        f"There is no valid compute template in {folder}, which $GPUSHARE_TEMPLATES names: waiting for files there, on "
        "Kubernetes for the ConfigMap gpushare-templates, whose files come a minute or two after it was made"
    )


def shown(value: object) -> str:
    """Return what somebody sent, cut short."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def named(display_name: str, key: str) -> str:
    """Return the form's name, with the key that a request writes if that is another: "0.25 GPU (quarter)"."""
    return display_name if display_name == key else f"{display_name} ({key})"


def listed(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the choices of an option, separated by commas. ``choices``: by the key that a request writes."""
    names = (named(str(choice.get("display_name") or key), key) for key, choice in choices.items())
    return ", ".join(names) or "those on the form"


def not_an_object(options: object) -> str:
    """Return that options must be an object."""
    return f'The options of a server must be an object like {{"profile": "quarter-gpu"}}, not {shown(options)}.'


def not_a_name(profile: object) -> str:
    """Return that the option profile must be text."""
    return f"profile must be the name of a template, not {shown(profile)}."


def not_allowed(template: str, allowed: Iterable[str]) -> str:
    """Return that the template is for other users. ``template``, ``allowed``: see `named`."""
    return (
        f"You may not use the template {template}. It is for certain users and groups. "
        f"You may use: {', '.join(allowed) or 'none'}."
    )


def unknown_template(template: str, allowed: Iterable[str]) -> str:
    """Return that there is no such template. ``allowed``: those that this user may use, see `named`."""
    return f"There is no template {shown(template)}. You may use: {', '.join(allowed) or 'none'}."


def unknown_quota(quota: object, known: Iterable[str]) -> str:
    """Return that the user has no such quota. ``known``: names of those that this user may use."""
    return f"You have no quota {shown(quota)}. You may use: {', '.join(known)}."


def unknown_option(option: object, profile: str, known: Iterable[str]) -> str:
    """Return that the profile has no such option. ``known``: the options that it has."""
    return f"Unknown option {shown(option)}; {profile} has: {', '.join(known)}."


def limit_reached(limit: int, profile: str) -> str:
    """Return that the user runs as many servers with the profile as the limit allows."""
    servers = "one server" if limit == 1 else f"{limit} servers"
    return f"You may run {servers} with {profile} at a time. Stop one first, or choose another template."


def unknown_choice(where: str, choice: object, choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return that an option has no such choice. ``where``: the profile and the option; ``choices``: see `listed`."""
    return f"{where}: there is no choice {shown(choice)}; choose one of {listed(choices)}."


def only_listed_choices(where: str, choices: Mapping[str, Mapping[str, Any]]) -> str:
    """Return that an option takes no other text than its choices, see `listed`."""
    return f"{where}: choose one of {listed(choices)}."


def text_too_long(where: str, most: int) -> str:
    """Return that the text of an option is no text, or has more than ``most`` characters."""
    return f"{where}: write at most {most} characters of text."


def unusable_pattern(where: str, problem: str) -> str:
    """Return that the admin's pattern for the text of an option cannot be used. ``problem``: why, and what would do."""
    return f"{where}: no text can be accepted, because {problem}. Tell the admin of this hub (validation_regex)."


def text_does_not_match(where: str, text: str, advice: str) -> str:
    """Return that the text of an option is not valid. ``advice``: what would be right, without a full stop."""
    return f"{where}: {shown(text)} is not valid: {advice}."


def cannot_apply(template: str, why: str) -> str:
    """Return that the spawner cannot apply the settings of a template. ``template``: see `named`."""
    return f"The template {template} cannot be started on this hub: {why}. Tell the admin."
