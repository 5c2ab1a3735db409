"""Dead letters: records that could not be processed, kept byte for byte on `<topic>.dlq`.

In: bad records with their errors. Out: letters with context headers, marks on them, replays to the original topic.
Begin reading in `records` (letters, marks, replay rules); `owner`, `context` and `limits` write letters, `actions`
replays and drops them."""
