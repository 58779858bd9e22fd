"""Models and services that judge images: one file each. They know nothing of training, nor of configs."""
