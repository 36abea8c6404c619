"""Classification of handwritten digits: a small task, and an example of how a task is added."""
