"""Classification of Fashion-MNIST's images: a task of images that trains in minutes."""
