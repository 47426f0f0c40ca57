"""What the masks of a data set are found to be, before anything is trained with them."""
