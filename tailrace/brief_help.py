"""Help that fits a screen: options that few need are shown by --help=all only."""

from __future__ import annotations

import click

_ALL = "tailrace: all options"
# Characters of a first sentence, at most.
_SENTENCE = 500


class Rare(click.Option):
    """An option that few need."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return None where the help is brief; see click.Parameter."""
        return super().get_help_record(ctx) if ctx.meta.get(_ALL) else None


class BriefCommand(click.Command):
    """A command that may have rare options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show all options for --help=all; otherwise parse."""
        if "--help=all" in args:
            show_all(ctx)
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say how many options are not shown, before the epilog."""
        rare = sum(isinstance(parameter, Rare) for parameter in self.params)
        if rare and not ctx.meta.get(_ALL):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(f"{rare} more options, which few need: --help=all")
        super().format_epilog(ctx, formatter)


class WholeGroup(click.Group):
    """A group whose help wraps what its commands do, where click would cut it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the first sentence of each."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(_SENTENCE)) for name, each in commands if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def show_all(ctx: click.Context) -> None:
    """Have the context's help show rare options, too."""
    ctx.meta[_ALL] = True
