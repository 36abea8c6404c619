"""Small tasks that show the parts of a task: digits, Fashion-MNIST, the photographs of CIFAR-10."""
