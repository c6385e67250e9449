"""`mqproc completion SHELL`: click's own completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mqproc.cli.commands import Command
from mqproc.cli.main import cli

VARIABLE = "_MQPROC_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the shell completion script.

    SHELL is bash, zsh or fish. Commands, options and their values are completed, and names of topics and groups of the
    store that the line, or MQPROC_STORE, names.

    \b
    bash:  eval "$(mqproc completion bash)"                    in ~/.bashrc
    zsh:   eval "$(mqproc completion zsh)"                     in ~/.zshrc, behind compinit
    fish:  mqproc completion fish > ~/.config/fish/completions/mqproc.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "mqproc", VARIABLE).source())
