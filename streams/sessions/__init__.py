"""Links the turns of conversations: session events become tasks, results and what came next (docs/sessions.md)."""
