"""Tells optimum-cli about `prune`. Installed as `optimum/commands/register/register_prune.py`.

optimum-cli imports this file for every one of its commands, so nothing imported here may be slow or fail.
"""

from optimum_prune.commands.prune import PruneCommand

REGISTER_COMMANDS = [PruneCommand]
