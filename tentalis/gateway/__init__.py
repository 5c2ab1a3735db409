"""The gateway: where people's agents ask for completions, and where what they said is written down."""
