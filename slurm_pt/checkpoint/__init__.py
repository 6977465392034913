"""The state of a run on disk, so that an attempt can go on where the last one stopped.

Takes: named tensors of this rank, how they are split over the tensor group, and plain JSON.
Gives: committed folders `checkpoints/step_00000012/`, and the newest usable one back, in any
layout.
Never does: pickle, overwrite a committed step, delete the last good one, or start afresh in
silence when checkpoints are there but cannot be used.

`store` is the folders and files, without torch: the login node reads it. `tensor_index` says where
each tensor lies, `tensor_bytes` moves its bytes, `tensor_files` is a rank's part of all that.
`state` says which tensors this rank saves, `random_state` the random generators. `checkpointer` is
what the ranks call: `saving` is a snapshot's way to disk, `resuming` the way back, `verification`
the look at checksums by all ranks. `base_model` says which weights adapters belong to,
`whole_model` merges them, `hugging_face` converts from and to Hugging Face folders, `peft` adapters
alone.
"""
