"""ArrayRecord files, and the directories of TensorFlow Datasets that hold them."""
