"""`tailrace completion`: print a script that completes commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command(epilog='Example: eval "$(tailrace completion bash)"')
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options in SHELL. Have the shell read it at its start:

    \b
    bash  eval "$(tailrace completion bash)"        in ~/.bashrc
    zsh   eval "$(tailrace completion zsh)"         in ~/.zshrc
    fish  tailrace completion fish | source         in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click has no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, "tailrace", "_TAILRACE_COMPLETE").source())
