"""What the tests train: healthy models, planted faults, slow projects. Other people's projects are in `projects`."""
