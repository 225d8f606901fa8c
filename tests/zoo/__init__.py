"""Modules that tests train: healthy ones, planted faults, slow projects. Other people's projects are in `projects`."""
