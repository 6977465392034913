"""Monitoring: takes run folders and one answer of Slurm, gives status rows and progress lines.

Live figures come from the run folder; the controller is asked as seldom as can be. Never imports
torch.
"""
