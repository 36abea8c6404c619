"""Classification of CIFAR-10's images, each of which is a client: the papers' centralised task."""
