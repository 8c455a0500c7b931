"""The commands of optimum-cli."""
