"""Print every verb of the command line with its options as Markdown, from the program itself."""

import re
import sys


def rows(parameters):
    """A table of options; arguments first, in capitals."""
    lines = ["| option | |", "|---|---|"]
    for parameter in sorted(parameters, key=lambda parameter: parameter.param_type_name != "argument"):
        if parameter.name == "help" or parameter.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        text = " ".join((parameter.help or "").split()).replace("\\[", "[")
        if parameter.default not in (None, False, "", [], ()):  # as --help prints it
            text += f" Default: {parameter.default}."
        lines.append(f"| {names} | {text.replace('|', chr(92) + '|')} |")
    return lines if len(lines) > 2 else []


def verbs(command, path, level=3):
    """The lines about a command and the commands below it."""
    inner = getattr(command, "commands", {})
    text, _, examples = (command.help or "").partition("Example")
    if level > 2:
        yield f"{'#' * level} {path}\n\n{text.strip()}\n"
    if examples:
        listed = re.split(r";\s+", " ".join(examples.partition(":")[2].split()))
        yield "\n".join(["```", *listed, "```", ""])
    if level > 2 and not inner:
        yield "\n".join([*rows(command.params), ""])
    for name in sorted(inner):
        yield from verbs(inner[name], f"{path} {name}", level + 1)


def markdown():
    import typer

    from oelm.cli.main import app

    return "\n".join(verbs(typer.main.get_command(app), "oelm", level=2))


if __name__ == "__main__":
    sys.argv[0] = "oelm"  # the package then imports what the command line needs, and no torch
    print(markdown())
