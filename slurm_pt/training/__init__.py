"""Trains a model: the model, its data, the optimizer and the loop of steps.

Takes: `ModelConfig`, `TrainConfig`, token files, and the process groups of `parallel`.
Gives: a rank's part of the model, batches, optimizer steps, and one `StepRecord` a step.
Never: saves or loads (the caller passes `save`), knows of Slurm or of signals (the caller
passes `stop_requested`), or keeps state that is not a function of the step number, apart from
weights, moments and float16's loss scale.

Import the modules by name; this one imports no torch. `data` and `corpus` need numpy only.
"""
