"""Worker processes of TensorFlow Federated, on this machine and on others."""
