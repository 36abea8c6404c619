"""Small tasks that show what a task needs: handwritten digits, and the photographs of CIFAR-10."""
