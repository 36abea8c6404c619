"""Use of worker processes of TensorFlow Federated on other machines."""
