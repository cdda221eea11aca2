"""Command lines and configuration files, made from the dataclasses that hold the options."""

from tokenspeed_jax.options.command_line import CommandLine, Configuration, ParsedOptions
from tokenspeed_jax.options.option import option_name

__all__ = ["CommandLine", "Configuration", "ParsedOptions", "option_name"]
