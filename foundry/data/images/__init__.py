"""Image datasets: labelled images, image folders, and text examples with images."""
