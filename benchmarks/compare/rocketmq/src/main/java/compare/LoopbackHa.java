package compare;

import org.apache.rocketmq.store.ha.DefaultHAService;

/**
 * The broker's replication without its listener, which would be on every interface. A broker without
 * replicas does not need it.
 */
public class LoopbackHa extends DefaultHAService {
  @Override
  public void start() {
    groupTransferService.start();
    haConnectionStateNotificationService.start();
  }
}
