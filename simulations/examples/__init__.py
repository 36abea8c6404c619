"""Small tasks that show what a task needs: digits, Fashion-MNIST, the photographs of CIFAR-10."""
