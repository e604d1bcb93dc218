import io.zbus.mq.disk.DiskMessage;
import io.zbus.mq.disk.Index;
import io.zbus.mq.disk.QueueReader;
import io.zbus.mq.disk.QueueWriter;
import java.io.File;
import java.util.Arrays;
import java.util.Random;

/** A work of works.py on the disk queue of zbus, once to warm up and once for the clock: WORK DIRECTORY SIZE RECORDS */
class ZbusWork {
    static final int BATCH = 1_000;
    static final byte[][] POOL = new byte[BATCH][];

    public static void main(String[] arguments) throws Exception {
        String work = arguments[0], directory = arguments[1];
        int records = Integer.parseInt(arguments[3]);
        Random random = new Random(1);
        for (int at = 0; at < BATCH; at++) {
            random.nextBytes(POOL[at] = new byte[Integer.parseInt(arguments[2])]);
        }
        long took = 0;
        for (String name : new String[] {"warm", "queue"}) {
            Index index = new Index(new File(directory, name));
            took = work.equals("put_many") ? put(index, records) : get(index, records, work);
            index.close();
        }
        System.out.printf("{\"seconds\": %.6e, \"records\": %d}%n", took / 1e9 / records, records);
    }

    static long put(Index index, int records) throws Exception {
        long began = System.nanoTime();
        QueueWriter writer = new QueueWriter(index);
        DiskMessage[] batch = new DiskMessage[BATCH];
        for (int done = 0; done < records; done += BATCH) {
            for (int at = 0; at < BATCH; at++) {
                batch[at] = new DiskMessage();
                batch[at].body = POOL[at];
                batch[at].tag = "order.new.eu";
            }
            writer.write(batch);
        }
        writer.close();
        return System.nanoTime() - began;
    }

    static long get(Index index, int records, String work) throws Exception {
        QueueReader reader = new QueueReader(index, work);
        if (work.startsWith("filter_")) {
            reader.setFilter(work.equals("filter_all") ? "order.*.eu" : "order.*.us");
        }
        DiskMessage[] batch = new DiskMessage[BATCH];
        int done = 0, got;
        long took = 0;
        do {
            long began = System.nanoTime();
            for (got = 0; got < BATCH && (batch[got] = reader.read()) != null; got++) {}
            took += System.nanoTime() - began;
            for (int at = 0; at < got; at++, done++) {
                if (!Arrays.equals(batch[at].body, POOL[done % BATCH])) {
                    throw new IllegalStateException("message " + done + " is another than was put");
                }
            }
        } while (got == BATCH);
        reader.close();
        if (done != (work.equals("filter_none") ? 0 : records)) {
            throw new IllegalStateException(done + " of " + records + " messages");
        }
        return took;
    }
}
