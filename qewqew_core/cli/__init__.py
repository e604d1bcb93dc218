"""The command line, a file for each family of commands. Nothing else imports typer and rich.

It may import all of the core, and nothing imports it.
"""
