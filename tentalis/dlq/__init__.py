"""Dead letters: their `context`, the `limits` past which nobody writes more, the `owner` who keeps those of a topic,
what a topic of `letters` says, and the `letterbox` that acts on them."""
