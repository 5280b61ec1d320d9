"""Text games of several turns: their rules, boards and episodes. Imports nothing of the package but its errors."""
