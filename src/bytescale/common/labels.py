"""The label of tokens without a target, which loaders write and the loss ignores; and names of fields of tokens."""

IGNORE_INDEX = -100
"""The label that ``torch.nn.functional.cross_entropy`` ignores by default."""

OWN_FIELDS = ("weights", "labels")
"""Fields whose meaning the loss knows. Any corpus may have them, whatever ``data.fields`` names."""

MICRO_BATCH_NAMES = (
    "inputs", "num_rows", "index", "logprobs", "loss_sum", "segments", "position_ids", "plan", "target",
    "documents", "inputs_for", "multiplicity", "rows", "record_routes", "replay", "routes",
    "chosen_keys", "record_chosen_keys", "replay_chosen_keys", "placeholders", "rotary_positions",
)  # fmt: skip
"""What a micro-batch of a loop of one's own has itself (``hf.loop.micro_batch``)."""

RESERVED_FIELDS = (*MICRO_BATCH_NAMES, *OWN_FIELDS, "tokens", "input_ids")
"""Names that ``data.fields`` cannot have."""
