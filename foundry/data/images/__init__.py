"""Images: classes, folders of images, and examples about them."""
