package brokerless.spark;

import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.OpenOption;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.LocalFileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * Hadoop's own local file system, but for two things. Without its native library it starts the program {@code chmod} for
 * every file and folder that it makes, which for the checkpoint of a small batch takes longer than the batch. And it
 * syncs nothing: after a power cut a checkpoint could be older than the tables that its batches went to.
 */
public final class PlainFileSystem extends LocalFileSystem {
  public PlainFileSystem() {
    super(new Raw());
  }

  private static final class Raw extends RawLocalFileSystem {
    @Override
    public boolean rename(Path from, Path to) throws IOException {
      if (!from.getName().contains(".tmp")) { // what Spark calls the files of a checkpoint until they are whole
        return super.rename(from, to);
      }
      sync(from, StandardOpenOption.WRITE);
      boolean done = super.rename(from, to);
      sync(to.getParent(), StandardOpenOption.READ);
      return done;
    }

    private void sync(Path path, OpenOption mode) throws IOException {
      try (FileChannel file = FileChannel.open(pathToFile(path).toPath(), mode)) {
        file.force(true);
      }
    }

    @Override
    public void setPermission(Path path, FsPermission permission) throws IOException {
      if (permission.getStickyBit()) {
        super.setPermission(path, permission); // Java does not know that bit
        return;
      }
      String rights = permission.getUserAction().SYMBOL + permission.getGroupAction().SYMBOL
          + permission.getOtherAction().SYMBOL;
      Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(rights));
    }
  }
}
