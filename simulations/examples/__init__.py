"""Example tasks for training runs, which are digits, Fashion-MNIST and CIFAR-10."""
