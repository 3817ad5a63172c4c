package brokerless.spark;

/** Something is not as a journal should be. Whoever reads asks Python, which knows what to do about it. */
final class FallbackException extends Exception {
  FallbackException(String what) {
    super(what, null, false, false);
  }
}
