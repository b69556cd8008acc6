"""`vfsd doctor` and `vfsd completion`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import get_completion_class

from vfsd.cli.common import output
from vfsd.cli.common.app import App, Command

if TYPE_CHECKING:
    from vfsd.machine.doctor import Finding

_COLOURS: Final = {"ok": "green", "missing": "red", "optional": "yellow"}


@click.command(
    "doctor",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    vfsd doctor
    vfsd doctor --deep                     # also mount, answer one request, and unmount
    vfsd doctor --json
    """,
)
@click.option("--deep", is_flag=True, help="Also make a mount in a temporary directory, and use it.")
@click.pass_obj
def doctor_command(app: App, deep: bool) -> None:
    """Check what this machine needs to mount workspaces.

    Each line starts with "ok", "missing" (and says what to do) or "optional" (vfsd works without it).
    The last line is the command that repairs what is missing, if there is one.
    The exit status is 1 if something is missing.
    """
    # Start-up: a shell that starts runs `vfsd completion`.
    from vfsd.machine.doctor import examine, repair_command  # noqa: PLC0415

    findings = examine(deep=deep)
    missing = any(_verdict(finding) == "missing" for finding in findings)
    repair = repair_command(findings)
    document = {"ok": not missing, "findings": findings, "repair": repair}
    app.emit(document, lambda _: _show_findings(findings))
    if missing:
        advice = f"this repairs it: {repair}" if repair else "see above"
        output.report(f"this machine lacks something that vfsd needs; {advice}")
        click.get_current_context().exit(1)


def _verdict(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    return "optional" if finding.optional else "missing"


def _show_findings(findings: Sequence[Finding]) -> None:
    """Print findings: on a terminal with the advice below; in a pipe as tab-separated verdict, topic, text, advice."""
    for finding in findings:
        verdict = _verdict(finding)
        if not output.on_terminal():
            output.say("\t".join((verdict, finding.topic, *map(output.show_path, (finding.what, finding.advice)))))
            continue
        coloured = click.style(verdict.ljust(len("optional")), fg=_COLOURS[verdict])
        output.say(f"{coloured}  {finding.topic}: {output.show_path(finding.what)}")
        if finding.advice:
            output.say(f"{'':10}{click.style('→', dim=True)} {output.show_path(finding.advice)}")


# -- completion -------------------------------------------------------------------------------------
_SHELLS: Final = ("bash", "zsh", "fish")
_VARIABLE: Final = "_VFSD_COMPLETE"  # the name that click derives from the program's name

# Corrections of click's scripts.  Each pair is a part of a script, and what replaces it.
_CHANGES: Final = (
    # bash breaks words at the characters of COMP_WORDBREAKS, such as ":" and "=", and replaces only what follows the
    # last one.  This joins the words that no blank separates; `before` is what bash keeps of the last one.
    (
        '    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD ',
        """\
    local rest=$COMP_LINE words= before= word= at= count=0
    for ((at = 0; at <= COMP_CWORD; at++)); do
        if ((at > 0)) && [[ $rest == [[:blank:]]* || $rest != "${COMP_WORDS[at]}"* ]]; then
            rest=${rest#"${rest%%%%[![:blank:]]*}"} words+=$IFS before= word=
            ((++count))
        fi
        before+=$word word=${COMP_WORDS[at]}
        rest=${rest#"$word"} words+=$word
    done
    [[ -n $word && $COMP_WORDBREAKS == *"$word"* ]] && before+=$word
    [[ $before == -*=* ]] && before=${before#*=}

    response=$(env COMP_WORDS="$words" COMP_CWORD=$count """,
    ),
    (
        "        IFS=',' read type value <<< \"$completion\"\n",
        """\
        IFS=',' read type value <<< "$completion"
        value=${value#"$before"}
""",
    ),
    # bash: items of type "path".  -o filenames quotes blanks; a directory gets no blank after it, so that <Tab> can go
    # on.
    (
        "            COMPREPLY+=($value)\n",
        """\
            [[ $word == [\\"\\']* ]] || printf -v value %%q "$value"
            COMPREPLY+=("$value")
            [[ $value == *: ]] && compopt -o nospace
        elif [[ $type == 'path' ]]; then
            COMPREPLY+=("$value")
            compopt -o filenames
            [[ $value == */ ]] && compopt -o nospace
""",
    ),
    # zsh: what is offered replaces the whole word, so it has to begin with --option=.
    (
        "    for type key descr in ${response}; do\n",
        """\
    local option=
    [[ $PREFIX == --*=* ]] && option=${PREFIX%%%%=*}=

    for type key descr in ${response}; do
""",
    ),
    (
        """        elif [[ "$type" == "dir" ]]; then""",
        """\
        elif [[ "$type" == "path" && "$key" == */ ]]; then
            compadd -U -q -S "" -P "$option" -- "$key"
        elif [[ "$type" == "path" ]]; then
            compadd -U -P "$option" -- "$key"
        elif [[ "$type" == "dir" ]]; then""",
    ),
    ("completions_with_descriptions -U\n", 'completions_with_descriptions -U -P "$option"\n'),
    ("        compadd -U -V unsorted", '        compadd -U -P "$option" -V unsorted'),
    # fish, which adds no blank after "/", and takes only what begins with the whole word, also for --option=value.  A
    # value may have a comma.
    (
        '        set -l metadata (string split "," $completion);',
        '        set -l metadata (string split -m 1 "," $completion);',
    ),
    (
        "    for completion in $response;\n",
        """\
    set -l option (string match -r -- '^--[^=]+=' (commandline -t));

    for completion in $response;
""",
    ),
    (
        "            __fish_complete_directories $metadata[2];\n",
        '            printf "%%s\\n" "$option"(__fish_complete_directories $metadata[2]);\n',
    ),
    (
        "            __fish_complete_path $metadata[2];\n",
        '            printf "%%s\\n" "$option"(__fish_complete_path $metadata[2]);\n',
    ),
    (
        '        else if test $metadata[1] = "plain";\n            echo $metadata[2];\n',
        '        else if contains $metadata[1] plain path;\n            echo "$option$metadata[2]";\n',
    ),
)


@click.command(
    "completion",
    cls=Command,
    acts_on_workspace=False,
    examples="""
    eval "$(vfsd completion bash)"         # in ~/.bashrc
    eval "$(vfsd completion zsh)"          # in ~/.zshrc
    vfsd completion fish > ~/.config/fish/completions/vfsd.fish
    """,
)
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.pass_context
def completion_command(ctx: click.Context, shell: str | None) -> None:
    """Print the script that completes vfsd's commands in a shell.

    It completes commands, options, the names of workspaces and snapshots, and the paths in a workspace or snapshot.
    SHELL defaults to $SHELL.
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(name)
    if name not in _SHELLS or kind is None:
        raise click.UsageError(f"name a shell: {', '.join(_SHELLS)}")
    completer = kind(ctx.find_root().command, {}, "vfsd", _VARIABLE)
    # Use the template directly: click's source() would also start bash to get its version.
    script = _changed(completer.source_template) % completer.source_vars()
    ctx.obj.emit({"shell": name, "script": script}, lambda answer: output.say(answer["script"]))


def _changed(script: str) -> str:
    for part, replacement in _CHANGES:
        script = script.replace(part, replacement)
    return script
